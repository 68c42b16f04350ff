"""The weights of a Hugging Face folder, from safetensors only: other formats are pickles, which run code when read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from flame.errors import CheckpointError
from flame.train.checkpoint_tensors import named_tensors
from flame.train.hf_names import match_names

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, in one file or in many.

    They are views of the mapped files: no memory of the process is taken until one is copied, so the files must stay.
    Raises `CheckpointError` where there are no safetensors, where one is absent or damaged, and where the index and
    its files disagree.
    """
    files = _files(folder)
    tensors: dict[str, Tensor] = {}
    for file, expected in files.items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError("a file of the weights is absent", where=path, fix="Restore it from where it came")
        try:
            with safe_open(path, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"a file of the weights cannot be read: {error}", where=path) from error
        if expected is not None and expected - found.keys():
            raise CheckpointError(
                f"a file of the weights lacks tensors that {_INDEX} promises",
                where=path,
                got=", ".join(sorted(expected - found.keys())[:4]),
            )
        tensors |= found
    return tensors


@torch.no_grad()
def load_hf_weights(model: PreTrainedModel, folder: Path) -> None:
    """Fill `model`, which is on the CPU in fp32, from a Hugging Face folder: the same numbers, tensor by tensor.

    Raises `CheckpointError` as `open_weights` and `match_names` do.
    """
    weights = open_weights(folder)
    found = {name: (tensor.size(), tensor.dtype) for name, tensor in weights.items()}
    names = match_names(model, found, weights.__getitem__, folder)
    for own, tensor in named_tensors(model).items():
        tensor.copy_(weights[names[own]])


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Return the names of the files, each with the tensors that it must hold where an index says so."""
    if (folder / _INDEX).is_file():
        try:
            places = json.loads((folder / _INDEX).read_bytes())["weight_map"]
            files: dict[str, set[str] | None] = {
                file: {name for name, place in places.items() if place == file} for file in sorted({*places.values()})
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the index of the weights cannot be understood: {error!r}", where=folder / _INDEX
            ) from error
        if any(not isinstance(file, str) or Path(file).name != file for file in files):
            raise CheckpointError(
                "the index of the weights names no files, or files outside its folder", where=folder / _INDEX
            )
        return files
    if (folder / _WHOLE).is_file():
        return {_WHOLE: None}
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            "the folder's weights are pickles, which can run code when they are read",
            where=folder,
            got=", ".join(pickles[:4]),
            expected=f"{_WHOLE}, or {_INDEX} and its files",
            fix="If you trust them, load them with transformers where nothing can be harmed, and save the model by "
            "save_pretrained, which writes safetensors",
        )
    raise CheckpointError("the folder holds no weights", where=folder, expected=f"{_WHOLE}, or {_INDEX} and its files")
