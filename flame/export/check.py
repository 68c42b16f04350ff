"""Does an export hold what the checkpoint holds? It is loaded as its users will load it, and compared bit by bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flame.errors import CheckpointError
from flame.export.dtypes import exported
from flame.train.checkpoint_tensors import StoredModel, named_tensors
from flame.train.families import FAMILIES
from flame.train.hf_names import FORMATS
from flame.train.model_config import import_definitions


def check_export(folder: Path, stored: StoredModel) -> int:
    """Load `folder` by transformers, offline, and compare it with the weights it was made from.

    Returns the number of tensors compared. Raises `CheckpointError` for a key that is missing or unexpected, for a bit
    that differs, and where the configurations and the tokenizer disagree. Cost: the whole model in memory, once.
    """
    config = json.loads((folder / "config.json").read_bytes())
    with _known_model_type(config["model_type"], folder):
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True
        )
    problems = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    if problems:
        raise CheckpointError(
            "the export does not load cleanly", where=folder, got=problems, expected="every key, once"
        )
    loaded = named_tensors(model)
    _compare_names(set(loaded), set(stored.tensors), folder)
    for name in stored.tensors:
        expected = exported(name, stored.read(name), FORMATS[config["dtype"]])
        if not _same_bits(loaded[name].detach(), expected):
            raise CheckpointError(f"the export's {name} is not the checkpoint's", where=folder)
    _check_agreement(folder, model)
    return len(loaded)


@contextlib.contextmanager
def _known_model_type(model_type: str, folder: Path) -> Iterator[None]:
    """Let transformers build a model of this type in the block: fla's and one's own are known once imported.

    Code that lies in the export is not run: one's own is that of custom_models/.
    """
    import_definitions(model_type)
    from_fla = model_type in FAMILIES and FAMILIES[model_type].from_fla
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            "the export cannot be checked here: no library here knows its kind of model",
            where=folder,
            got=f"model_type {model_type}",
            fix="Export without the check",
        )
    if not from_fla:
        yield
        return
    from flame.train.fla_modules import flash_attention_not_needed  # imports fla: seconds

    with flash_attention_not_needed():
        yield


def _compare_names(loaded: set[str], stored: set[str], folder: Path) -> None:
    if loaded != stored:
        raise CheckpointError(
            "the export's model has other tensors than the checkpoint",
            where=folder,
            got=f"only in the export: {sorted(loaded - stored)}; only in the checkpoint: {sorted(stored - loaded)}",
        )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _check_agreement(folder: Path, model: Any) -> None:
    """Raise unless config, generation config and tokenizer name the same EOS and BOS."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    for name in ("eos_token_id", "bos_token_id"):
        stated = getattr(config, name)
        ids = {"config.json": stated, "generation_config.json": getattr(model.generation_config, name)}
        if tokenizer is not None:
            own = getattr(tokenizer, name)
            ids["the tokenizer"] = stated if isinstance(stated, list) and own in stated else own
        if any(value != stated for value in ids.values()):
            raise CheckpointError(f"the export's files disagree about {name}", where=folder, got=ids)
