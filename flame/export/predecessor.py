"""A DCP folder of the predecessor → a Hugging Face folder: the weights, the optimizer's state is left.

Its keys are `model.<name>`, or bare names where weights alone were saved; a tied weight stands under each of its names.
It says neither its configuration nor its tokenizer, and has no checksums: what is read is held against the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flame.errors import CheckpointError, UsageError
from flame.export.dtypes import main_dtype
from flame.export.hf import check_request, export_checkpoint, write_folder
from flame.export.skeleton import build_skeleton, skeleton_files
from flame.near import near_path
from flame.train.checkpoint_files import COMPLETE
from flame.train.checkpoint_tensors import named_tensors
from flame.train.foreign import check_foreign, open_foreign, stored_rows
from flame.train.initial import DCP_INDEX


def export_any(
    checkpoint: Path, output: Path, *, config: Path | None, tokenizer: Path | None, fast_open: bool, **options: Any
) -> Path:
    """Export a checkpoint of ours, or with `config` and `tokenizer` a DCP folder of the predecessor."""
    given = {"--config": config, "--tokenizer": tokenizer}
    if not checkpoint.exists():
        raise UsageError("there is no such checkpoint", where=checkpoint)
    for path, marker in ((config, "config.json"), (tokenizer, "tokenizer.json")):
        if path is not None and not path.exists():
            raise UsageError("there is no such file or folder", where=path, fix=near_path(path, marker))
    if not is_predecessors(checkpoint):
        if any(given.values()) and not any((checkpoint / name).exists() for name in (COMPLETE, DCP_INDEX)):
            raise CheckpointError(
                "the folder is no checkpoint, neither of ours nor of the predecessor",
                where=checkpoint,
                expected=f"{COMPLETE}, or the {DCP_INDEX} of a DCP folder",
            )
        if names := [name for name, path in given.items() if path is not None]:
            raise UsageError(
                "a checkpoint has a configuration and a tokenizer of its own",
                where=checkpoint,
                fix=f"Leave {' and '.join(names)} away",
            )
        return export_checkpoint(checkpoint, output, fast_open=fast_open, **options)
    if config is None or tokenizer is None:
        raise UsageError(
            "a DCP folder of the predecessor holds neither its model's configuration nor its tokenizer",
            where=checkpoint,
            fix="Name both by --config and --tokenizer",
        )
    return export_predecessor(checkpoint, output, config=config, tokenizer=tokenizer, **options)


def is_predecessors(checkpoint: Path) -> bool:
    """Tell whether a folder is a DCP folder that is no checkpoint of ours, not even a damaged one."""
    return (checkpoint / DCP_INDEX).is_file() and not any((checkpoint / name).exists() for name in (COMPLETE, "hf"))


def export_predecessor(
    checkpoint: Path,
    output: Path,
    *,
    config: Path,
    tokenizer: Path,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    check: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write `output`, as `export_checkpoint` does, with the model of `config` (a file or folder), and return it.

    The model gets as many embedding rows as the weights have: the predecessor raised the configuration's to the
    tokenizer's. Raises as `export_checkpoint` does, and `CheckpointError` where names or shapes are not the model's.
    """
    check_request(output, dtype, max_shard_size)
    model = build_skeleton(config, trust_remote_code=trust_remote_code)
    stored = open_foreign(checkpoint, model)
    if (rows := stored_rows(stored, model)) not in (None, model.get_input_embeddings().weight.shape[0]):
        model = build_skeleton(config, rows=rows, trust_remote_code=trust_remote_code)
    check_foreign(stored, model)
    stored.tensors = {name: stored.tensors[name] for name in named_tensors(model)}
    files = skeleton_files(model, tokenizer, main_dtype(stored.tensors.values()))
    write_folder(output, stored, files, dtype=dtype, max_shard_size=max_shard_size, check=check)
    return output
