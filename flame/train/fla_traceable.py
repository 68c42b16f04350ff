"""Layers of flash-linear-attention in forms that `torch.compile` holds whole, for blocks that are to be compiled.

fla's layers call Triton kernels that cut a graph wherever they stand: each norm, gate and activation. Here these are
plain formulas, which the compiler fuses with each other, with residual additions and casts, and the chunk kernel among
them is an operator (`flame/kernels/linear_attention.py`). An object gets another class, as sharding does it: it keeps
its parameters, their names and its settings; only its forward is another. Results are equal within rounding.

Eager training keeps fla's own forms: without a compiler plain formulas are slower and keep more for backward.
"""

from __future__ import annotations

from typing import Any

from fla import layers
from fla.models.rwkv7.modeling_rwkv7 import RWKV7FeedForward
from fla.modules import FusedRMSNormGated, GatedMLP, GroupNorm, LayerNorm, RMSNorm
from fla.modules.layernorm_gated import RMSNormGated
from torch import nn

from flame.train import fla_traceable_layers as traceable
from flame.train import fla_traceable_parts as parts
from flame.train import fla_traceable_rwkv7 as rwkv7

_TRACEABLE: dict[type, type] = {
    RMSNorm: parts.TraceableRMSNorm,
    FusedRMSNormGated: parts.TraceableGatedNorm,
    RMSNormGated: parts.TraceableMamba2Norm,
    GatedMLP: parts.TraceableGatedMLP,
    layers.DeltaNet: traceable.TraceableDeltaNet,
    layers.GatedDeltaNet: traceable.TraceableGatedDeltaNet,
    layers.GatedLinearAttention: traceable.TraceableGLA,
    layers.GatedSlotAttention: traceable.TraceableGSA,
    layers.HGRN2Attention: traceable.TraceableHGRN2,
    layers.KimiDeltaAttention: traceable.TraceableKDA,
    layers.MultiScaleRetention: traceable.TraceableRetention,
    layers.RWKV7Attention: rwkv7.TraceableRWKV7,
    RWKV7FeedForward: rwkv7.TraceableFeedForward,
    GroupNorm: rwkv7.TraceableGroupNorm,
    LayerNorm: rwkv7.TraceableLayerNorm,
}
_FUNCTIONS = ("feature_map", "feature_map_fn", "gate_fn", "act_fn")


def make_traceable(blocks: list[nn.Module]) -> str | None:
    """Give the parts of the blocks the forms of this file, or say why one has none and leave them as they are."""
    modules = [module for block in blocks for module in block.modules() if type(module) in _TRACEABLE]
    refusal = next(filter(None, map(_refusal, [*blocks, *modules])), None)
    if refusal is None:
        for module in modules:
            _give_form(module)
    return refusal


def _give_form(module: Any) -> None:
    for name in _FUNCTIONS:
        function = getattr(module, name, None)
        if function is not None:
            delattr(module, name)  # it may be a module
            setattr(module, name, parts.plain(function))
    vars(module)["is_first"] = getattr(module, "layer_idx", None) == 0
    module.__class__ = _TRACEABLE[type(module)]


def _refusal(module: Any) -> str | None:
    if getattr(module, "use_attnres", False):
        return "each takes another number of residuals (attnres_block_size)"
    if type(module) is GatedMLP and module.hidden_act != "swish":
        return f"the activation of an MLP is {module.hidden_act}, and only swish has a form for graphs"
    if getattr(module, "mode", "chunk") != "chunk":
        return f"the mode of a layer is {module.mode}, and only chunk has a form for graphs"
    if type(module) is layers.DeltaNet and module.qk_norm != "l2":
        return f"qk_norm is {module.qk_norm}, and only l2 has a form for graphs"
    for name in _FUNCTIONS:
        function = getattr(module, name, None)
        if function is not None and parts.plain(function) is None:
            return f"a layer's {name} has no form for graphs"
    return None
