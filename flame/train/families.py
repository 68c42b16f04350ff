"""How each kind of model is trained here: how it is built, and how packed documents reach its layers.

`FAMILIES` maps a model type to its `Family`. A model type that is not in it takes `GENERIC`: its own logits and a plain
cross entropy, which the log names and packed documents refuse. A package in `custom_models/` may add its own entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from flame.errors import TrainingError
from flame.kernels.dispatch import ATTENTION
from flame.kernels.varlen_attention import longest, pad_cu_seqlens, row_attention

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model.

    `construct(config, attention)` builds it in fp32 on the current default device, with the named implementation of
    attention. `sequence_arguments(model, positions, cu_seqlens, max_seqlen)` are what its forward takes beside
    `input_ids`; `cu_seqlens` and `max_seqlen` are None where documents are not masked. `config_refusal(config)` says
    why a configuration cannot be trained here, or None; `packed_refusal` why packed documents cannot, or None.
    """

    construct: Callable[[PretrainedConfig, str], PreTrainedModel]
    sequence_arguments: Callable[[Any, Tensor, Tensor | None, int | None], Arguments]
    config_refusal: Callable[[PretrainedConfig], str | None]
    packed_refusal: str | None = None
    fused_loss: bool = True
    """Whether the loss is the linear cross entropy of the base model's last hidden states and the head."""
    compiles: bool = True
    needs_cuda: bool = False
    from_fla: bool = False
    norm_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each `model.norm_type` sets in the configuration."""


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a configuration, `GENERIC` where its model type has no entry of its own."""
    return FAMILIES.get(config.model_type, GENERIC)


def check_family(config: PretrainedConfig, *, varlen: bool, device: torch.device) -> None:
    """Raise `TrainingError`, with the reason, if this configuration cannot be trained on packed documents or here."""
    family = family_of(config)
    refusal = _kind_refusal(config) or _expert_refusal(config) or family.config_refusal(config)
    if refusal is not None:
        raise TrainingError(f"a model of the type {config.model_type} cannot be trained as configured: {refusal}")
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


def _packing_types() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.packed_refusal is None]


def _kind_refusal(config: PretrainedConfig) -> str | None:
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config).__module__.startswith("transformers_modules.")
    return None if known else "it is not a causal language model"


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_memories")


def _expert_refusal(config: PretrainedConfig) -> str | None:
    for name in _EXPERT_COUNTS:
        if (getattr(config, name, None) or 0) > 1:
            return f"it is a mixture of experts ({name} is {getattr(config, name)}), whose auxiliary loss is not in yet"
    return None


# ---- Hugging Face decoders: attention through an interface of ours, in which no mask is ever built ------------------


def _construct_decoder(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    # transformers takes any name with sdpa in it for torch's, which it refuses to models with soft caps
    interface = f"flame_{attention}".replace("sdpa", "by_document")
    AttentionInterface.register(interface, _attention_interface(attention))
    return _from_config(config, attn_implementation=interface)


def _attention_interface(attention: str) -> Callable[..., tuple[Tensor, None]]:
    """Return transformers' kind of attention function over `[B, H, T, D]`, which gives back `[B, T, H, D]`.

    transformers builds masks only for the implementations that it knows, so that `attention_mask` stays None.
    """
    attend_packed = ATTENTION[attention].run

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: Tensor | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None and dropout == 0.0, "flame's attention has neither masks nor dropout"
        assert s_aux is None, "flame's attention has no sinks"
        assert query.shape[2] == key.shape[2], "flame's attention is for training: it reads no cache"
        limits: Arguments = {"scale": scaling, "window": sliding_window, "softcap": softcap}
        if cu_seq_lens_q is None:
            return row_attention(attend_packed, query, key, value, **limits).transpose(1, 2), None
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out_THD = attend_packed(*packed, cu_seq_lens_q, max_length_q, **limits)
        return out_THD.unflatten(0, (query.shape[0], query.shape[2])), None

    return attend


def _decoder_arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    arguments: Arguments = {"position_ids": positions, "use_cache": False}
    if cu_seqlens is not None and max_seqlen is not None:
        arguments |= {"cu_seq_lens_q": pad_cu_seqlens(cu_seqlens), "max_length_q": longest(max_seqlen)}
    return arguments


def _decoder_refusal(config: PretrainedConfig) -> str | None:
    if getattr(config, "attention_dropout", 0.0):
        return f"attention_dropout is {config.attention_dropout}, and attention here has no dropout; set it to 0"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention is set, and attention here is causal; set it to false"
    return None


# ---- flash-linear-attention ----------------------------------------------------------------------------------------


def _construct_fla(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    from flame.train.fla_modules import flash_attention_not_needed, replace_attention  # imports fla: seconds

    with flash_attention_not_needed():
        model = _from_config(config)
    replace_attention(model, attention)
    return model


def _construct_fla_transformer(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build fla's transformer of plain torch parts: they run anywhere, and compile into one graph a block."""
    from flame.train.fla_modules import replace_gated_mlps

    plain = deepcopy(config)
    plain.fuse_norm, plain.fuse_swiglu = False, False
    model = _construct_fla(plain, attention)
    replace_gated_mlps(model)
    model.config = config  # what is saved says what was asked for; the blocks keep their own
    return model


def _fla_arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    arguments: Arguments = {"positions": positions, "use_cache": False}
    if cu_seqlens is not None and max_seqlen is not None:
        arguments |= {"cu_seqlens": cu_seqlens, "max_seqlen": longest(max_seqlen)}
    return arguments


def _fla_transformer_arguments(
    model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Arguments:
    from flame.train.fla_modules import rotation

    padded = None if cu_seqlens is None else pad_cu_seqlens(cu_seqlens)
    arguments = _fla_arguments(model, positions, padded, max_seqlen)
    # once for all layers: a compiled block would take the cosine anew for each head
    return arguments | {"turn": rotation(positions, model.base_model.layers[0].attn.inv_freq)}


def _fla_refusal(config: PretrainedConfig) -> str | None:
    if getattr(config, "use_l2warp", False):
        return "use_l2warp adds a term to the loss that is not available here; set it to false"
    return None


def _fla_transformer_refusal(config: PretrainedConfig) -> str | None:
    if getattr(config, "attnres_block_size", None) is not None:
        return "attention residuals (attnres_block_size) are not available yet; set attnres_block_size to null"
    if config.hidden_act != "swish":
        return f"hidden_act is {config.hidden_act}, and only swish is available"
    return _fla_refusal(config)


# ---- any other causal language model -------------------------------------------------------------------------------


def _construct_generic(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    return _from_config(config)


def _generic_arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    return {"use_cache": False}


def _no_refusal(config: PretrainedConfig) -> str | None:
    return None


def _from_config(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model in fp32; transformers writes into the configuration that it is given, so it gets a copy.

    A folder's own code runs only where its configuration already did, which `--model.trust_remote_code` allowed.
    """
    trusted = type(config).__module__.startswith("transformers_modules.")
    options |= {"dtype": torch.float32, "trust_remote_code": trusted}
    return AutoModelForCausalLM.from_config(deepcopy(config), **options)


GENERIC = Family(
    construct=_construct_generic,
    sequence_arguments=_generic_arguments,
    config_refusal=_no_refusal,
    packed_refusal="nothing is known here about how it keeps documents apart",
    fused_loss=False,
)

_DECODER = Family(construct=_construct_decoder, sequence_arguments=_decoder_arguments, config_refusal=_decoder_refusal)

_FLA_NORMS = {"rmsnorm": {"fuse_norm": False}, "fused_rmsnorm": {"fuse_norm": True}}

_FLA_TRANSFORMER = Family(
    construct=_construct_fla_transformer,
    sequence_arguments=_fla_transformer_arguments,
    config_refusal=_fla_transformer_refusal,
    from_fla=True,
    norm_types=_FLA_NORMS,
)

# Compiling a block gains nothing here: its kernels are Triton already, and cut the graph.
_FLA_LINEAR = Family(
    construct=_construct_fla,
    sequence_arguments=_fla_arguments,
    config_refusal=_fla_refusal,
    compiles=False,
    needs_cuda=True,
    from_fla=True,
    norm_types=_FLA_NORMS,
)

_FLA_STATE_SPACE = Family(
    construct=_construct_fla,
    sequence_arguments=_fla_arguments,
    config_refusal=_fla_refusal,
    packed_refusal="its state-space layers ignore cu_seqlens, so that a document would read the one before it",
    compiles=False,
    needs_cuda=True,
    from_fla=True,
    norm_types=_FLA_NORMS,
)

FAMILIES: dict[str, Family] = {
    "gemma2": _DECODER,
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "transformer": _FLA_TRANSFORMER,
    "delta_net": _FLA_LINEAR,
    "gated_deltanet": _FLA_LINEAR,
    "gla": _FLA_LINEAR,
    "gsa": _FLA_LINEAR,
    "hgrn2": _FLA_LINEAR,
    "kda": _FLA_LINEAR,
    "rwkv7": _FLA_LINEAR,
    "stickbreaking_attn": _FLA_LINEAR,
    "mamba": _FLA_STATE_SPACE,
    "mamba2": _FLA_STATE_SPACE,
    "samba": _FLA_STATE_SPACE,
}
