"""Which kinds of model are known here, and which of them can be trained as configured.

`FAMILIES` maps a model type to its `Family`. A model type that is not in it takes `GENERIC`: its own logits and a plain
cross entropy, which the log names and packed documents refuse. A package in `custom_models/` may add its own entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from flame.errors import TrainingError
from flame.train.families_fla import FLA_FAMILIES
from flame.train.families_hf import HF_FAMILIES
from flame.train.family import Arguments, Family, from_config


def _construct_generic(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    return from_config(config)


def _generic_arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    return {"use_cache": False}


def _no_refusal(config: PretrainedConfig) -> str | None:
    return None


GENERIC = Family(
    construct=_construct_generic,
    sequence_arguments=_generic_arguments,
    config_refusal=_no_refusal,
    packed_refusal="nothing is known here about how it keeps documents apart",
    fused_loss=False,
)

FAMILIES: dict[str, Family] = {**HF_FAMILIES, **FLA_FAMILIES}


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a configuration, `GENERIC` where its model type has no entry of its own."""
    return FAMILIES.get(config.model_type, GENERIC)


def check_family(
    config: PretrainedConfig, *, varlen: bool, device: torch.device, longest_sequence: int | None = None
) -> None:
    """Raise `TrainingError`, with the reason, if this configuration cannot be trained on packed documents or here.

    `longest_sequence` is the most tokens that a document, or a row without document masks, will have; None is unknown.
    """
    family = family_of(config)
    refusal = _kind_refusal(config) or _expert_refusal(config, family) or family.config_refusal(config)
    if refusal is not None:
        raise TrainingError(f"a model of the type {config.model_type} cannot be trained as configured: {refusal}")
    if longest_sequence is not None and family.learned_positions is not None:
        _check_positions(config, family.learned_positions, longest_sequence)
    if varlen and family.packed_refusal is not None:
        raise TrainingError(
            f"packed documents cannot be used with a model of the type {config.model_type}: {family.packed_refusal}",
            fix="Turn packing off with --training.varlen false, or choose one of " + ", ".join(_packing_types()),
        )
    if device.type != "cuda" and (
        family.needs_cuda or (family is GENERIC and type(config).__module__.startswith("fla."))
    ):
        raise TrainingError(
            f"a model of the type {config.model_type} runs on a CUDA GPU only: its kernels are written in Triton",
            got=f"the device {device.type}",
            fix="Train it on a GPU, or choose a model that runs anywhere, such as llama, qwen3 or transformer",
        )


def _check_positions(config: PretrainedConfig, name: str, longest_sequence: int) -> None:
    num_positions = getattr(config, name)
    if longest_sequence > num_positions:
        raise TrainingError(
            f"a model of the type {config.model_type} has a learned embedding for each position, and too few of them",
            got=f"{name} {num_positions}, sequences of up to {longest_sequence} tokens",
            expected=f"{name} of at least the longest sequence",
            fix=f"Raise {name} in the model's configuration, or lower --training.context_len (with varlen) or "
            "--training.seq_len",
        )


def _packing_types() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.packed_refusal is None]


def _kind_refusal(config: PretrainedConfig) -> str | None:
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config).__module__.startswith("transformers_modules.")
    return None if known else "it is not a causal language model"


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_memories")


def _expert_refusal(config: PretrainedConfig, family: Family) -> str | None:
    if family.balances_experts:
        return None
    for name in _EXPERT_COUNTS:
        if (getattr(config, name, None) or 0) > 1:
            return f"it is a mixture of experts ({name} is {getattr(config, name)}), and what balances them is unknown"
    return None
