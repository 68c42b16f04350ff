"""Saving and loading a run (model, optimizer, train state) by torch's distributed checkpoint, on any number of ranks.

Keys: `model.<name in the model's own state dict>`, `optimizer.state.<that name>.<moment>`, and `train_state`, a JSON
object as bytes. Tied weights are kept once. Hyperparameters are not kept: the configuration sets them after loading.
Both functions are collective: all ranks call them, and all raise when one fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from flame.errors import CheckpointError
from flame.files import (
    fsync_folder,
    named_disk_errors,
    publish,
    remove_tree,
    temporary_path,
    write_bytes,
    write_json,
)
from flame.train.checkpoint_files import (
    COMPLETE,
    Choice,
    Complete,
    FileRecord,
    find_damage,
    make_room,
    record_of_file,
    step_folder,
)
from flame.train.checkpoint_tensors import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    TRAIN_STATE,
    check_moments,
    check_names_and_shapes,
    named_tensors,
    optimizer_targets,
    optimizer_tensors,
    read_metadata,
    set_optimizer_state,
)
from flame.train.checkpoint_writer import HashingWriter
from flame.train.distributed import World, broadcast_from_main, on_main, raise_together
from flame.train.foreign import check_foreign, open_foreign
from flame.train.identity import DataIdentity
from flame.train.log import log
from flame.train.train_state import TrainState


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    state: TrainState,
    identity: DataIdentity | None,
    config_toml: str,
    hf_files: Mapping[str, bytes],
    world: World,
) -> Path:
    """Write the checkpoint of `state.step` and return its folder; a whole one that is there already is kept.

    `model` is the inner model, whose names the keys are; without `optimizer` weights alone are kept. `hf_files` are the
    small files of `hf/`. Raises as `write_checkpoint` does.
    """
    return write_checkpoint(
        folder,
        tensors=tensors_to_save(model, optimizer, state),
        state=state,
        has_optimizer=optimizer is not None,
        identity=identity,
        small_files=small_files(config_toml, hf_files),
        world=world,
    )


def tensors_to_save(model: nn.Module, optimizer: Optimizer | None, state: TrainState) -> dict[str, Tensor]:
    """Return what a checkpoint holds, by its key; the very parameters and moments, not copies."""
    named = named_tensors(model)
    tensors = {MODEL_PREFIX + name: tensor.detach() for name, tensor in named.items()}
    if optimizer is not None:
        tensors |= optimizer_tensors(optimizer, named)
    tensors[TRAIN_STATE] = torch.frombuffer(bytearray(state.to_json()), dtype=torch.uint8)
    return tensors


def small_files(config_toml: str, hf_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what lies beside the tensors, by its name in the checkpoint."""
    return {"config.toml": config_toml.encode("utf-8"), **{f"hf/{name}": data for name, data in hf_files.items()}}


def write_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    state: TrainState,
    has_optimizer: bool,
    identity: DataIdentity | None,
    small_files: Mapping[str, bytes],
    world: World,
) -> Path:
    """Write `tensors` as the checkpoint of `state.step` and return its folder; a whole one that is there is kept.

    Raises `CheckpointError` (`TrainingError` on ranks that did not fail themselves): then nothing was published, and
    earlier checkpoints are untouched. Cost: every byte is written and hashed once, and fsynced.
    """
    final = step_folder(folder, state.step)
    if broadcast_from_main(world.is_main and find_damage(final, check_bytes=False) is None, world):
        return final
    temporary = temporary_path(final)
    try:
        with _together(world, "saving a checkpoint", final):
            if world.is_main:
                make_room(folder, state.step)
                for name, data in small_files.items():
                    write_bytes(temporary / name, data)
        records = _write_tensors(temporary, tensors, world)
        with _together(world, "saving a checkpoint", final):
            if world.is_main:
                complete = Complete(
                    step=state.step,
                    consumed_samples=state.consumed_samples,
                    has_optimizer=has_optimizer,
                    identity=identity,
                    files={**records, **{name: record_of_file(temporary / name) for name in small_files}},
                )
                _publish(temporary, final, complete)
    except BaseException:
        if world.is_main:
            with contextlib.suppress(OSError):  # half a checkpoint is of no use, and the disk may be full
                remove_tree(temporary)
        raise
    return final


def _write_tensors(temporary: Path, tensors: Mapping[str, Tensor], world: World) -> dict[str, FileRecord]:
    """Write every rank's part; returns the records of all ranks' files."""
    writer = HashingWriter(temporary)
    with _together(world, "writing a checkpoint", temporary, needed_bytes=_own_bytes(tensors)):
        try:
            save(dict(tensors), storage_writer=writer, process_group=world.patient_group)
        except CheckpointException as failure:
            _raise_own(failure, world, temporary, writer.disk_error)
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, writer.records, group=world.patient_group)
    return {name: record for records in gathered for name, record in records.items()}


def _own_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())


def _publish(temporary: Path, final: Path, complete: Complete) -> None:
    """Seal a checkpoint whose files are all written: complete.json, then the folder's name."""
    for name, record in complete.files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != record.size:
            raise CheckpointError(
                f"{name} is not as its rank wrote it",
                where=temporary,
                got=f"{path.stat().st_size} bytes" if path.is_file() else "no such file",
                expected=f"{record.size} bytes",
                fix="All ranks must write into one shared file system: choose another job.dump_folder",
            )
    write_json(temporary / COMPLETE, complete.to_json())
    for folder in (temporary / "hf", temporary):
        if folder.is_dir():
            fsync_folder(folder)
    publish(temporary, final)


def load_checkpoint(
    choice: Choice, *, model: nn.Module, optimizer: Optimizer | None, world: World, with_weights: bool = True
) -> TrainState:
    """Fill `model` and `optimizer` from a checkpoint, to the last bit, and return where the run stood.

    Works for any number of ranks and any sharding. Without `optimizer` no moments are read, without `with_weights` no
    weights. Raises `CheckpointError` where the checkpoint's names or shapes are not the model's, or where moments are
    asked for that it lacks (step 0, a seed, has none yet) or that another kind of optimizer has.
    """
    targets: dict[str, Tensor] = {}
    with _together(world, "loading a checkpoint", choice.path):
        named = named_tensors(model)
        targets = _targets(choice, named, with_weights=with_weights, optimizer=optimizer)
    _load_tensors(choice.path, targets, world)
    if optimizer is not None:
        set_optimizer_state(optimizer, named, targets)
    return TrainState.from_json(targets[TRAIN_STATE].numpy().tobytes())


def load_foreign_weights(path: Path, *, model: PreTrainedModel, world: World) -> None:
    """Fill `model` from a DCP folder of the predecessor; its other states are left alone.

    Raises `CheckpointError` where the weights are not the model's (see `check_foreign`).
    """
    prefix = on_main(f"looking into {path}", partial(_foreign_prefix, path, model), world)
    targets = {prefix + name: tensor.detach() for name, tensor in named_tensors(model).items()}
    _load_tensors(path, targets, world)


def _foreign_prefix(path: Path, model: PreTrainedModel) -> str:
    stored = open_foreign(path, model)
    check_foreign(stored, model)
    return stored.prefix


def _load_tensors(path: Path, targets: Mapping[str, Tensor], world: World) -> None:
    """Fill `targets`, by key, from a DCP folder, and log what was read and how long it took."""
    began = time.monotonic()
    with _together(world, "loading a checkpoint", path):
        try:
            load(dict(targets), storage_reader=FileSystemReader(path), process_group=world.patient_group)
        except CheckpointException as failure:
            _raise_own(failure, world, path)
    num_weights = sum(not key.startswith(OPTIMIZER_PREFIX) and key != TRAIN_STATE for key in targets)
    num_moments = sum(key.startswith(OPTIMIZER_PREFIX) for key in targets)
    seconds = time.monotonic() - began
    log.info("loaded %d weights and %d moments from %s in %.1f s", num_weights, num_moments, path, seconds)


def _targets(
    choice: Choice, named: Mapping[str, Tensor], *, with_weights: bool, optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return the tensors to fill, by key; the model's are its own parameters."""
    if optimizer is not None and not choice.complete.has_optimizer and choice.step > 0:
        raise CheckpointError(
            "the checkpoint holds weights only, so that a run cannot be resumed from it",
            where=choice.path,
            fix="Resume from an earlier step (checkpoint.load_step), or start a new run from these weights",
        )
    metadata = read_metadata(choice.path)
    check_names_and_shapes(named, metadata, choice.path)
    targets: dict[str, Tensor] = {}
    if with_weights:
        targets |= {MODEL_PREFIX + name: tensor.detach() for name, tensor in named.items()}
    if optimizer is not None:
        moments = optimizer_targets(named, metadata, choice.path)
        check_moments(optimizer, named, moments, choice.path)
        targets |= moments
    stored_state: Any = metadata.state_dict_metadata[TRAIN_STATE]
    targets[TRAIN_STATE] = torch.empty(stored_state.size, dtype=torch.uint8)
    return targets


@contextlib.contextmanager
def _together(world: World, what: str, where: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Run the block on every rank, then raise on all of them if it raised on any: none waits for one that has gone."""
    error: Exception | None = None
    try:
        with named_disk_errors(where, needed_bytes):
            yield
    except OSError as caught:
        error = CheckpointError(f"{what} failed: {caught}", where=where)
    except Exception as caught:
        error = caught
    raise_together(error, world, what)


def _raise_own(failure: CheckpointException, world: World, where: Path, disk_error: OSError | None = None) -> None:
    """Raise this rank's part of a failure that every rank was told of; nothing where it had no part in it."""
    if disk_error is not None:
        raise disk_error
    if failure.failures and world.rank not in failure.failures:
        return
    reason: BaseException = failure.failures[world.rank][0] if failure.failures else failure
    if not isinstance(reason, Exception | CheckpointException):
        raise reason
    if isinstance(reason, CheckpointError):
        raise reason
    detail = " ".join(f"{type(reason).__name__} {reason}".split())
    raise CheckpointError(f"the checkpoint cannot be read or written: {detail}", where=where) from reason
