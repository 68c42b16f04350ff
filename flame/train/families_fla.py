"""flash-linear-attention's models: which of their layers take cu_seqlens, and with which parts they are built."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from flame.kernels.varlen_attention import longest, pad_cu_seqlens
from flame.train.family import Arguments, Family, from_config
from flame.train.log import log


def _construct_fla(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    from flame.kernels.linear_attention import totals_known
    from flame.train.fla_modules import flash_attention_not_needed, replace_attention  # imports fla: seconds
    from flame.train.fla_short_convolution import replace_short_convolutions
    from flame.train.fla_traceable_layers import replace_gated_delta_nets

    totals_known()
    with flash_attention_not_needed():
        model = from_config(config)
    replace_attention(model, attention)
    replace_short_convolutions(model)
    replace_gated_delta_nets(model)
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


def _construct_mamba2(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    from flame.train.fla_modules import replace_mamba2

    model = from_config(config)
    replace_mamba2(model)
    return model


def _construct_mamba(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    if find_spec("mamba_ssm") is None:
        log.warning(
            "%s: without the package mamba_ssm fla's selective scan is a loop in Python over all tokens: it is right, "
            "and hundreds of times slower",
            config.model_type,
        )
    return _construct_fla(config, attention)


def _make_traceable(blocks: list[nn.Module]) -> str | None:
    from flame.train.fla_traceable import make_traceable

    return make_traceable(blocks)


def _fla_arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    arguments: Arguments = {"positions": positions, "use_cache": False}
    if cu_seqlens is not None and max_seqlen is not None:
        arguments |= {"cu_seqlens": cu_seqlens, "max_seqlen": longest(max_seqlen)}
    return arguments


def _fla_linear_arguments(
    model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Arguments:
    padded = None if cu_seqlens is None else pad_cu_seqlens(cu_seqlens)
    return _fla_arguments(model, positions, padded, max_seqlen)


def _fla_transformer_arguments(
    model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Arguments:
    from flame.train.fla_modules import rotation

    arguments = _fla_linear_arguments(model, positions, cu_seqlens, max_seqlen)
    # once for all layers: a compiled block would take the cosine anew for each head
    return arguments | {"turn": rotation(positions, model.base_model.layers[0].attn.inv_freq)}


def _fla_refusal(config: PretrainedConfig) -> str | None:
    if getattr(config, "use_l2warp", False):
        return "use_l2warp adds a term to the loss that is not available here; set it to false"
    keys, values = getattr(config, "num_heads", None), getattr(config, "num_v_heads", None)
    if keys and values and values % keys:
        return f"num_v_heads is {values}, and must be a multiple of num_heads, which is {keys}"
    return None


def _fla_transformer_refusal(config: PretrainedConfig) -> str | None:
    if getattr(config, "attnres_block_size", None) is not None:
        return "attention residuals (attnres_block_size) are not available yet; set attnres_block_size to null"
    if config.hidden_act != "swish":
        return f"hidden_act is {config.hidden_act}, and only swish is available"
    return _fla_refusal(config)


def _mamba2_refusal(config: PretrainedConfig) -> str | None:
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act is {config.hidden_act}, and only silu is available"
    return _fla_refusal(config)


_FLA_NORMS = {"rmsnorm": {"fuse_norm": False}, "fused_rmsnorm": {"fuse_norm": True}}

_FLA_TRANSFORMER = Family(
    construct=_construct_fla_transformer,
    sequence_arguments=_fla_transformer_arguments,
    config_refusal=_fla_transformer_refusal,
    from_fla=True,
    norm_types=_FLA_NORMS,
)

_FLA_LINEAR = Family(
    construct=_construct_fla,
    sequence_arguments=_fla_linear_arguments,
    config_refusal=_fla_refusal,
    traceable=_make_traceable,
    needs_cuda=True,
    from_fla=True,
    norm_types=_FLA_NORMS,
)

# Compiling a block gains nothing here: its kernels are Triton already, and cut the graph.
_FLA_CUT = replace(_FLA_LINEAR, sequence_arguments=_fla_arguments, traceable=None, compiles=False)

_FLA_MAMBA2 = replace(_FLA_LINEAR, construct=_construct_mamba2, config_refusal=_mamba2_refusal)

_FLA_MAMBA = replace(
    _FLA_CUT,
    construct=_construct_mamba,
    packed_refusal="its selective scan ignores cu_seqlens, so that a document would read the one before it",
)

FLA_FAMILIES: dict[str, Family] = {
    "transformer": _FLA_TRANSFORMER,
    "delta_net": _FLA_LINEAR,
    "gated_deltanet": _FLA_LINEAR,
    "gla": _FLA_LINEAR,
    "gsa": _FLA_LINEAR,
    "hgrn2": _FLA_LINEAR,
    "kda": _FLA_LINEAR,
    "retnet": _FLA_LINEAR,
    "rwkv7": _FLA_LINEAR,
    "stickbreaking_attn": _FLA_CUT,
    "mamba": _FLA_MAMBA,
    "mamba2": _FLA_MAMBA2,
    "samba": _FLA_MAMBA,
}
