"""A model without weights: what its tensors are called and how large they are, to hold foreign weights against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flame.errors import CheckpointError, TokenizerError
from flame.train.config_names import find_config
from flame.train.families import check_family
from flame.train.hf_files import build_hf_files
from flame.train.initial import GENERATION_CONFIG, read_generation_config
from flame.train.model_config import construct_model, load_model_config

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


def build_skeleton(source: Path, *, rows: int | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model that a config.json (or its folder) describes, on the meta device: no tensor takes any memory.

    Its configuration keeps its own embedding rows, or has `rows` of them, and its own special tokens; a folder's
    generation_config.json is taken along. Raises `TrainingError` where `flame-train` could not train such a model.
    """
    source = Path(find_config(str(source)))
    config = load_model_config(str(source), vocab_size=0, eos_id=0, keep_rows=True, trust_remote_code=trust_remote_code)
    if rows is not None:
        config.vocab_size = rows
    # A checkpoint is made on any machine: whether this one has a GPU is of no matter.
    check_family(config, varlen=False, device=torch.device("cuda"))
    with torch.device("meta"):
        model = construct_model(config, "sdpa")
    values = json.loads((source / "config.json" if source.is_dir() else source).read_bytes())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, values.get(name))
        setattr(model.generation_config, name, values.get(name))
    if (source / GENERATION_CONFIG).is_file():
        model.generation_config = read_generation_config(source)
    return model


def skeleton_files(model: PreTrainedModel, tokenizer: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the files of `hf/` for foreign weights: `tokenizer`'s BOS and EOS in all of them, and their dtype.

    A file of the tokenizer that says the same already stays as it is, byte for byte.
    """
    if not any(True for pattern in _TOKENIZERS for _ in tokenizer.glob(pattern)):
        raise TokenizerError(
            "the folder holds no tokenizer",
            where=tokenizer,
            expected="tokenizer.json and tokenizer_config.json",
            fix="Name a folder that does by --tokenizer",
        )
    files = build_hf_files(model, tokenizer, eos_id=None)
    config = json.loads(files["config.json"])
    _check_special_tokens(config, tokenizer)
    config["dtype"] = str(dtype).removeprefix("torch.")
    files["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    for name, data in files.items():
        own = tokenizer / name
        if name.startswith(("tokenizer_", "special_")) and own.is_file():
            files[name] = own.read_bytes() if json.loads(own.read_bytes()) == json.loads(data) else data
    return files


def _check_special_tokens(config: Mapping[str, Any], tokenizer: Path) -> None:
    rows = config["vocab_size"]
    for name in ("eos_token_id", "bos_token_id"):
        ids = config[name] if isinstance(config[name], list) else [config[name]]
        if any(number is not None and number >= rows for number in ids):
            raise CheckpointError(
                f"the tokenizer's {name.removesuffix('_token_id').upper()} has no embedding in these weights",
                where=tokenizer,
                got=f"id {config[name]}",
                expected=f"ids below {rows}, the model's embedding rows",
                fix="Resize the model's embeddings with transformers first, or choose the tokenizer of these weights",
            )
