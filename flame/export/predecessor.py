"""A DCP folder of the predecessor → a Hugging Face folder: the weights, the optimizer's state is left.

Its keys are `model.<name>`, or bare names where weights alone were saved; a tied weight stands under each of its names.
It says neither its configuration nor its tokenizer, and has no checksums: what is read is held against the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flame.errors import CheckpointError, UsageError
from flame.export.dtypes import main_dtype
from flame.export.hf import check_request, export_checkpoint, write_folder
from flame.export.skeleton import build_skeleton, skeleton_files
from flame.train.checkpoint_files import COMPLETE
from flame.train.checkpoint_tensors import MODEL_PREFIX, StoredModel, named_tensors
from flame.train.hf_names import match_names
from flame.train.initial import DCP_INDEX


def export_any(
    checkpoint: Path, output: Path, *, config: Path | None, tokenizer: Path | None, fast_open: bool, **options: Any
) -> Path:
    """Export a checkpoint of ours, or with `config` and `tokenizer` a DCP folder of the predecessor."""
    given = {"--config": config, "--tokenizer": tokenizer}
    for path in (checkpoint, *filter(None, given.values())):
        if not path.exists():
            raise UsageError(f"there is no such {'checkpoint' if path == checkpoint else 'file or folder'}", where=path)
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
    stored, model = _open(checkpoint, config, trust_remote_code)
    names = match_names(model, stored.tensors, stored.read, checkpoint)
    if foreign := [name for own, name in names.items() if own != name]:
        raise CheckpointError(
            "the weights have other names than the model's", where=checkpoint, got=", ".join(foreign[:4])
        )
    stored.tensors = {name: stored.tensors[name] for name in names.values()}
    files = skeleton_files(model, tokenizer, main_dtype(stored.tensors.values()))
    write_folder(output, stored, files, dtype=dtype, max_shard_size=max_shard_size, check=check)
    return output


def _open(checkpoint: Path, config: Path, trust_remote_code: bool) -> tuple[StoredModel, PreTrainedModel]:
    """Return the stored weights and the model that they should fill, with their number of embedding rows."""
    model = build_skeleton(config, trust_remote_code=trust_remote_code)
    kept = named_tensors(model)
    bare = StoredModel(checkpoint, prefix="")
    if kept.keys() <= bare.tensors.keys():
        tops = {name.partition(".")[0] for name in model.state_dict()}
        bare.tensors = {name: kind for name, kind in bare.tensors.items() if name.partition(".")[0] in tops}
        stored = bare
    else:
        stored = StoredModel(checkpoint, prefix=MODEL_PREFIX)
    if not stored.tensors:
        raise CheckpointError("the folder holds no model", where=checkpoint, expected="keys such as model.<name>")
    embedding = next(name for name, tensor in kept.items() if tensor is model.get_input_embeddings().weight)
    rows = stored.tensors[embedding][0][0] if embedding in stored.tensors else None
    if rows is not None and rows != kept[embedding].shape[0]:
        model = build_skeleton(config, rows=rows, trust_remote_code=trust_remote_code)
    return stored, model
