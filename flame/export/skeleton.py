"""A model without weights: what its tensors are called and how large they are, to hold foreign weights against."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from flame.errors import CheckpointError, FlameError, TokenizerError
from flame.export.dtypes import DTYPES
from flame.train.checkpoint_tensors import named_tensors
from flame.train.families import check_family, family_of
from flame.train.hf_files import build_hf_files
from flame.train.model_config import load_model_config

_NUM_NAMED = 4
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
# Buffers that old versions of transformers wrote, and that every model now computes.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")


def build_skeleton(source: Path, *, rows: int | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model that a config.json (or its folder) describes, on the meta device: no tensor takes any memory.

    Its configuration keeps its own embedding rows, or has `rows` of them, and its own special tokens; a folder's
    generation_config.json is taken along. Raises `TrainingError` where `flame-train` could not train such a model.
    """
    config = load_model_config(str(source), vocab_size=0, eos_id=0, keep_rows=True, trust_remote_code=trust_remote_code)
    if rows is not None:
        config.vocab_size = rows
    # A checkpoint is made on any machine: whether this one has a GPU is of no matter.
    check_family(config, varlen=False, device=torch.device("cuda"))
    with torch.device("meta"):
        model = family_of(config).construct(config, "sdpa")
    values = json.loads((source / "config.json" if source.is_dir() else source).read_bytes())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, values.get(name))
        setattr(model.generation_config, name, values.get(name))
    generation = source / "generation_config.json"
    if generation.is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(source, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the generation configuration cannot be understood: {error}", where=generation
            ) from error
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
    try:
        files = build_hf_files(model, tokenizer, eos_id=None)
    except FlameError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise TokenizerError(f"the tokenizer's files cannot be understood: {error}", where=tokenizer) from error
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


def match_names(
    model: PreTrainedModel,
    found: Mapping[str, tuple[torch.Size, torch.dtype]],
    read: Callable[[str], Tensor],
    where: Path,
) -> dict[str, str]:
    """Return, for each tensor that a checkpoint of `model` keeps, the name under which `found` has it.

    Tied weights may be there once, under either name, or twice and equal (`read` fetches them to see); a base model's
    names are taken where the head is tied or absent. Raises `CheckpointError` naming tensors that are missing,
    unexpected, of another shape, or in a number format that no model is trained from.
    """
    kept = named_tensors(model)
    ids = {id(tensor): name for name, tensor in kept.items()}
    aliases = {name: ids[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
    names = _own_names(model, found, aliases)
    matched: dict[str, str] = {}
    for own, name in sorted(names.items(), key=lambda pair: pair[0] not in kept):  # where it has both, its own name
        if own in aliases:
            first = matched.setdefault(aliases[own], name)
            if first != name and found[first] == found[name] and not torch.equal(read(first), read(name)):
                raise CheckpointError(
                    "the configuration ties two tensors, and the weights hold different numbers for them",
                    where=where,
                    got=f"{first} and {name}",
                    fix='Set "tie_word_embeddings" to false in config.json if they are meant to differ',
                )
    ignored = (*_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ()))
    missing = sorted(kept.keys() - matched.keys())
    unexpected = sorted(
        name
        for own, name in names.items()
        if own not in aliases and not any(re.search(pattern, name) for pattern in ignored)
    )
    if missing or unexpected:
        raise CheckpointError(
            "the weights are of another model than the configuration",
            where=where,
            got="; ".join(
                f"{what} {_first_few(some)}"
                for what, some in (("missing", missing), ("unexpected", unexpected))
                if some
            ),
            fix="Give the weights the config.json that they were made with",
        )
    _check_kinds(kept, {own: found[name] for own, name in matched.items()}, where)
    return {name: matched[name] for name in kept}


def _own_names(model: PreTrainedModel, found: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the model's own names → those of `found`, which may be a base model's, without its prefix."""
    prefix = model.base_model_prefix + "."
    if not any(name in aliases for name in found) and any(prefix + name in aliases for name in found):
        return {prefix + name: name for name in found}
    return {name: name for name in found}


def _check_kinds(kept: Mapping[str, Tensor], found: Mapping[str, tuple[torch.Size, torch.dtype]], where: Path) -> None:
    shapes = [
        f"{name} {tuple(found[name][0])} instead of {tuple(tensor.shape)}"
        for name, tensor in kept.items()
        if tuple(found[name][0]) != tuple(tensor.shape)
    ]
    if shapes:
        raise CheckpointError(
            "the weights are of another model than the configuration: their tensors have other shapes",
            where=where,
            got=_first_few(shapes),
            fix="Give the weights the config.json that they were made with",
        )
    kinds = [
        f"{name} {str(found[name][1]).removeprefix('torch.')}"
        for name, tensor in kept.items()
        if tensor.is_floating_point() and found[name][1] not in DTYPES.values()
    ]
    if kinds:
        raise CheckpointError(
            "the weights are in a number format that no training can begin from",
            where=where,
            got=_first_few(kinds),
            expected=", ".join(DTYPES),
            fix="Convert them first: quantized weights are not what a model was trained as",
        )


def _first_few(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
