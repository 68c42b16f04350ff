"""A checkpoint → a Hugging Face folder: sharded safetensors, configurations, tokenizer. No process group, no model.

Tensors are read one at a time; no more than one output file's worth is in memory. The optimizer is not read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from flame.errors import CheckpointError, DiskFullError, UsageError
from flame.export.check import check_export
from flame.export.dtypes import exported, exported_dtype, main_dtype
from flame.files import (
    free_bytes,
    fsync_file,
    fsync_folder,
    named_disk_errors,
    publish,
    remove_tree,
    temporary_path,
    write_bytes,
    write_json,
)
from flame.train.checkpoint_files import open_checkpoint
from flame.train.checkpoint_tensors import StoredModel
from flame.train.hf_names import FORMATS

DEFAULT_SHARD_SIZE = "5GB"


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = DEFAULT_SHARD_SIZE,
    fast_open: bool = False,
    check: bool = False,
    replace: bool = False,
) -> Path:
    """Write `output`, a folder that `AutoModelForCausalLM.from_pretrained` loads offline, and return it.

    `dtype` names one number format for all weights; None keeps the checkpoint's: float32 once it is trained, and at
    step 0 the source's own. `fast_open` trusts the checkpoint's file sizes; `check` reloads the result and compares
    every tensor before it appears under its name; `replace` puts it in the place of an earlier one. Raises `UsageError`
    for an output that is there already, `CheckpointError` for a checkpoint that is damaged or does not fit `dtype`;
    nothing is left then.
    """
    check_request(output, dtype, max_shard_size, replace=replace)
    choice = open_checkpoint(checkpoint, fast_open=fast_open)
    write_folder(
        output,
        StoredModel(choice.path),
        _kept_files(checkpoint),
        dtype=dtype,
        max_shard_size=max_shard_size,
        check=check,
    )
    return output


def check_request(output: Path, dtype: str | None, max_shard_size: str, *, replace: bool = False) -> None:
    """Raise `UsageError` for an output that is there already (unless it is to be replaced) and for wrong options."""
    if dtype is not None and dtype not in FORMATS:
        raise UsageError("no such dtype to export", got=dtype, expected=" or ".join(FORMATS))
    parse_shard_size(max_shard_size)
    if not replace and output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(
            "the output of the export is there already", where=output, fix="Choose another --output, or delete it"
        )


def write_folder(
    output: Path,
    stored: StoredModel,
    files: Mapping[str, bytes],
    *,
    dtype: str | None,
    max_shard_size: str,
    check: bool,
) -> None:
    """Write the weights and the small `files` (config.json among them) as a Hugging Face folder: all of it, or none."""
    target = None if dtype is None else FORMATS[dtype]
    said = main_dtype(stored.tensors.values()) if target is None else target
    config = {**json.loads(files["config.json"]), "dtype": str(said).removeprefix("torch.")}
    temporary = temporary_path(output)
    remove_tree(temporary)
    try:
        for name, data in files.items():
            if name != "config.json":
                write_bytes(temporary / name, data)
        write_json(temporary / "config.json", config)
        _write_weights(stored, temporary, target, parse_shard_size(max_shard_size))
        if check:
            check_export(temporary, stored)
        fsync_folder(temporary)
        _publish(temporary, output)
    except BaseException:
        remove_tree(temporary)
        raise


def parse_shard_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 200MB or 1000000 (units of 1000); `UsageError` otherwise."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)B?", text.strip().upper())
    size = round(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")) if match else 0
    if size <= 0:
        raise UsageError("max_shard_size is no size", got=text, expected="a size such as 5GB, 200MB or 500KB")
    return size


def _kept_files(checkpoint: Path) -> dict[str, bytes]:
    source = checkpoint / "hf"
    if not (source / "config.json").is_file():
        raise CheckpointError("the checkpoint keeps no config.json to export with", where=source)
    return {path.name: path.read_bytes() for path in sorted(source.iterdir())}


def _write_weights(stored: StoredModel, target: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    written = {name: (size, exported_dtype(kind, dtype)) for name, (size, kind) in stored.tensors.items()}
    sizes = {name: size.numel() * kind.itemsize for name, (size, kind) in written.items()}
    _check_room(target, sum(sizes.values()))
    split = split_state_dict_into_shards_factory(
        written,
        get_storage_size=lambda tensor: tensor[0].numel() * tensor[1].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        path = target / file
        tensors = {name: exported(name, stored.read(name), dtype) for name in names}
        try:
            with named_disk_errors(path, sum(sizes[name] for name in names)):
                _save(tensors, path)
        except OSError as error:
            raise CheckpointError(f"the export cannot be written: {error}", where=path) from error
        del tensors  # before the next file's are read: one file's weights are held, never two
        shutil.copymode(target / "config.json", path)  # safetensors lets only the owner read
        fsync_file(path)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(target / "model.safetensors.index.json", index)


def _check_room(target: Path, needed_bytes: int) -> None:
    """Raise `DiskFullError` before anything is written, where the weights have no room."""
    free = free_bytes(target)
    if free < needed_bytes:
        raise DiskFullError(
            "there is no room for the export",
            where=target.parent,
            got=f"{free:,} bytes free",
            expected=f"at least {needed_bytes:,} bytes",
            fix="Free space, choose another disk, or export in --dtype bfloat16",
        )


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file of weights; `OSError` where the disk refuses it, of which safetensors keeps the number as text."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error ([0-9]+)", str(error))
        if number is None:
            raise CheckpointError(f"the export cannot be written: {error}", where=path) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _publish(temporary: Path, output: Path) -> None:
    """Give the finished folder its name; an earlier one goes only once the new one is whole."""
    old = output.with_name(output.name + ".old")
    if output.is_dir() and any(output.iterdir()):
        remove_tree(old)
        publish(output, old)
    publish(temporary, output)
    remove_tree(old)
