"""Which tensor of foreign weights is which of a model: names, ties, shapes, number formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flame.errors import CheckpointError
from flame.train.checkpoint_tensors import first_few, named_tensors

# In which a model is trained from, and exported.
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Buffers that old versions of transformers wrote, and that every model now computes.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")


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
                f"{what} {first_few(some)}" for what, some in (("missing", missing), ("unexpected", unexpected)) if some
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
            "the weights are of another model than the configuration: their tensors have different shapes",
            where=where,
            got=first_few(shapes),
            fix="Give the weights the config.json that they were made with",
        )
    kinds = [
        f"{name} {str(found[name][1]).removeprefix('torch.')}"
        for name, tensor in kept.items()
        if tensor.is_floating_point() and found[name][1] not in FORMATS.values()
    ]
    if kinds:
        raise CheckpointError(
            "the weights are in a number format that no training can begin from",
            where=where,
            got=first_few(kinds),
            expected=", ".join(FORMATS),
            fix="Convert them first: quantized weights are not what a model was trained as",
        )
