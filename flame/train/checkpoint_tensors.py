"""The tensors of a checkpoint: what each is called, how an optimizer's moments are named, and reading one by itself."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from flame.errors import CheckpointError

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer.state."
TRAIN_STATE = "train_state"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_NUM_NAMED = 4
# What an optimizer keeps of a parameter, by the option that its groups have.
_MOMENTS = {"betas": {"step", "exp_avg", "exp_avg_sq"}, "momentum": {"momentum_buffer"}}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers by their names in a checkpoint; tied ones once.

    The values are the very parameters, sharded (DTensor) where the model is.
    """
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert isinstance(tensor, Tensor), f"{name} is no tensor"
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[plain_name(name)] = tensor
    return named


def plain_name(name: str) -> str:
    """Return a parameter's name as the model knows it, whatever compiling and recomputing have wrapped around parts."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def optimizer_tensors(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's moments and counters as `optimizer.state.<parameter>.<moment>`."""
    names = {id(tensor): name for name, tensor in named.items()}
    tensors: dict[str, Tensor] = {}
    for parameter, moments in optimizer.state.items():
        for moment, value in moments.items():
            if value is None:
                continue
            assert isinstance(value, Tensor), f"{moment} of {names[id(parameter)]} is no tensor"
            tensors[f"{OPTIMIZER_PREFIX}{names[id(parameter)]}.{moment}"] = value
    return tensors


def optimizer_targets(named: Mapping[str, Tensor], metadata: Metadata, where: Path) -> dict[str, Tensor]:
    """Return empty tensors for every moment that the checkpoint holds, sharded as their parameters are."""
    targets: dict[str, Tensor] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not key.startswith(OPTIMIZER_PREFIX):
            continue
        name = key.removeprefix(OPTIMIZER_PREFIX).rpartition(".")[0]
        if name not in named:
            raise CheckpointError(
                "the checkpoint's optimizer knows a parameter that the model lacks", where=where, got=name
            )
        assert isinstance(stored, TensorStorageMetadata)
        dtype = stored.properties.dtype
        if stored.size == named[name].shape:
            targets[key] = torch.zeros_like(named[name], dtype=dtype, requires_grad=False)
        else:
            targets[key] = torch.zeros(stored.size, dtype=dtype)
    return targets


def check_moments(optimizer: Optimizer, named: Mapping[str, Tensor], moments: Iterable[str], where: Path) -> None:
    """Raise `CheckpointError` if `moments` (keys of a checkpoint) are those of another kind of optimizer."""
    stored: dict[int, set[str]] = {}
    for key in moments:
        name, _, moment = key.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
        stored.setdefault(id(named[name]), set()).add(moment)
    for group in optimizer.param_groups:
        expected = next((kept for option, kept in _MOMENTS.items() if option in group), None)
        for parameter in group["params"]:
            found = stored.get(id(parameter), set())
            if expected is not None and found and found != expected:
                name = next(name for name, tensor in named.items() if tensor is parameter)
                raise CheckpointError(
                    "the checkpoint was saved with another kind of optimizer",
                    where=where,
                    got=f"of {name} {', '.join(sorted(found))}",
                    expected=", ".join(sorted(expected)),
                    fix="Give the optimizer.name that it was saved with, or begin this one's moments at zero with "
                    "--checkpoint.exclude_from_loading optimizer",
                )


def set_optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Make `loaded` (by the keys of `optimizer_tensors`) the optimizer's whole state; its hyperparameters stay.

    Not by `Optimizer.load_state_dict`, which casts moments to their parameter's dtype.
    """
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for key, value in loaded.items():
        if not key.startswith(OPTIMIZER_PREFIX):
            continue
        name, _, moment = key.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
        parameter = named[name]
        if id(parameter) not in on_device:
            continue
        if value.shape != parameter.shape and on_device[id(parameter)]:
            value = value.to(parameter.device)
        optimizer.state[parameter][moment] = value


def check_names_and_shapes(named: Mapping[str, Tensor], metadata: Metadata, where: Path) -> None:
    """Raise `CheckpointError`, naming the first few, unless the checkpoint's model has the model's names and shapes."""
    stored = {name: info.size for name, info in _stored_model(metadata).items()}
    absent = [name for name in named if name not in stored]
    foreign = [name for name in stored if name not in named]
    if absent or foreign:
        raise CheckpointError(
            "the checkpoint is of another model: their tensors have different names",
            where=where,
            got="; ".join(
                f"{what} {first_few(names)}"
                for what, names in (("absent from it", absent), ("unknown to the model", foreign))
                if names
            ),
            fix="Give the model.config that the checkpoint was made with",
        )
    other = [
        f"{name} {tuple(stored[name])} instead of {tuple(tensor.shape)}"
        for name, tensor in named.items()
        if tuple(stored[name]) != tuple(tensor.shape)
    ]
    if other:
        raise CheckpointError(
            "the checkpoint is of another model: their tensors have different shapes",
            where=where,
            got=first_few(other),
            fix="Give the model.config (and the vocabulary) that the checkpoint was made with",
        )


def read_metadata(checkpoint: Path) -> Metadata:
    """Read the index of a checkpoint's tensors. It is a pickle: only for checkpoints that one trusts."""
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's index cannot be read: {error}", where=checkpoint / ".metadata"
        ) from error


class StoredModel:
    """The model's tensors in a checkpoint, read one at a time by one process, with or without a process group.

    `tensors` maps names (the model's own) to shape and dtype, in an order that does not depend on how many ranks saved.
    """

    def __init__(self, checkpoint: Path, *, prefix: str = MODEL_PREFIX) -> None:
        self.checkpoint, self.prefix = checkpoint, prefix
        self._reader = _IndexedReader(checkpoint)
        stored = _stored_model(self._reader.metadata, prefix)
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (stored[name].size, stored[name].properties.dtype) for name in sorted(stored, key=_layer_order)
        }

    def read(self, name: str) -> Tensor:
        """Return one whole tensor, on the CPU, as it was saved."""
        size, dtype = self.tensors[name]
        target = {self.prefix + name: torch.empty(size, dtype=dtype)}
        try:
            with warnings.catch_warnings():
                # It says that no process group is used, which is what is asked for.
                warnings.simplefilter("ignore", UserWarning)
                load(target, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{name} cannot be read: {reason}", where=self.checkpoint) from None
        return target[self.prefix + name]


class _IndexedReader(FileSystemReader):
    """A reader that reads the index once, not once a tensor."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.metadata = read_metadata(checkpoint)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _stored_model(metadata: Metadata, prefix: str = MODEL_PREFIX) -> dict[str, TensorStorageMetadata]:
    return {
        key.removeprefix(prefix): info
        for key, info in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(info, TensorStorageMetadata)
    }


def _layer_order(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 after layer 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def first_few(names: list[str]) -> str:
    """Return a list for a message: the first four, and how many more there are."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
