"""Layers of flash-linear-attention in forms that `torch.compile` holds whole, for blocks that are to be compiled.

fla's layers call Triton kernels that cut a graph wherever they stand: each norm, gate and activation. Here these are
plain formulas, which the compiler fuses with each other, with residual additions and casts, and the chunk kernel among
them is an operator (`flame/kernels/linear_attention.py`). An object gets another class, as sharding does it: it keeps
its parameters, their names and its settings; only its forward is another. Results are equal within rounding.

Eager training keeps fla's own forms: without a compiler plain formulas are slower and keep more for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    KimiDeltaAttention,
    MultiScaleRetention,
)
from fla.modules import FusedRMSNormGated, GatedMLP, RMSNorm
from fla.modules.activations import ACT2FN
from fla.modules.feature_map import ReLUFeatureMap, SwishFeatureMap
from torch import Tensor, nn

from flame.kernels.linear_attention import linear_attention
from flame.train.fla_modules import rotate, rotation

Output = tuple[Tensor, None, None]
_FUSED_LINEAR_EPS = 1e-5
"""What fla's product after a norm takes, whatever the norm's own setting is."""


def make_traceable(blocks: list[nn.Module]) -> str | None:
    """Give the parts of the blocks the forms of this file, or say why one has none and leave them as they are."""
    parts = [part for block in blocks for part in block.modules()]
    refusal = next(filter(None, map(_refusal, parts)), None)
    if refusal is None:
        for part in parts:
            if type(part) in _TRACEABLE:
                vars(part)["is_first"] = getattr(part, "layer_idx", None) == 0
                part.__class__ = _TRACEABLE[type(part)]
    return refusal


def _refusal(module: Any) -> str | None:
    if getattr(module, "use_attnres", False):
        return "with attention residuals (attnres_block_size) each layer takes another number of them"
    if type(module) is GatedMLP and module.hidden_act != "swish":
        return f"its MLP's activation is {module.hidden_act}, and only swish has a form for graphs"
    if type(module) in _TRACEABLE and getattr(module, "mode", "chunk") != "chunk":
        return f"its layers are of the mode {module.mode}, and only chunk has a form for graphs"
    if type(module) is DeltaNet and module.qk_norm != "l2":
        return f"qk_norm is {module.qk_norm}, and only l2 has a form for graphs"
    for name in ("feature_map", "feature_map_fn", "gate_fn"):
        function = getattr(module, name, None)
        if type(module) in _TRACEABLE and function is not None and _plain(function) is None:
            return f"its {name} has no form for graphs"
    return None


# ---- formulas -------------------------------------------------------------------------------------------------------


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the root mean square norm of `x` in fp32. Source: Zhang and Sennrich 2019."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


_PLAIN: dict[Any, Callable[[Tensor], Tensor]] = {
    ACT2FN["relu"]: F.relu,
    ACT2FN["sigmoid"]: torch.sigmoid,
    ACT2FN["swish"]: F.silu,
    ReLUFeatureMap: F.relu,
    SwishFeatureMap: F.silu,
}


def _plain(function: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the plain form of one of fla's activations or feature maps, or None."""
    return _PLAIN.get(type(function) if isinstance(function, nn.Module) else function)


def _applied(function: Any, x: Tensor) -> Tensor:
    plain = _plain(function)
    assert plain is not None, "make_traceable refuses others"
    return plain(x)


class TraceableRMSNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
        """Return the norm of `x`, or of `x + residual`, and with `prenorm` that sum too."""
        x = x if residual is None else x + residual
        y = _normalised(x, self.weight, self.bias, self.eps).to(x.dtype)
        return (y, x) if prenorm else y


class TraceableGatedNorm(FusedRMSNormGated):
    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """Return `norm(x) · σ(g)`, or `norm(x) · g · σ(g)` with the activation swish."""
        gate = g.float().sigmoid() if self.activation == "sigmoid" else F.silu(g.float())
        return (_normalised(x, self.weight, None, self.eps) * gate).to(x.dtype)


class TraceableGatedMLP(GatedMLP):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


# ---- layers: `[B, T, D]` to the same ---------------------------------------------------------------------------------


def _projected(layer: Any, names: str, x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return the layer's projections of `x` by these names, each after its short convolution where there is one."""
    projected = [getattr(layer, f"{name}_proj")(x) for name in names]
    if not layer.use_short_conv:
        return projected
    convolutions = [getattr(layer, f"{name}_conv1d") for name in names]
    return [conv(x=y, cu_seqlens=cu_seqlens)[0] for conv, y in zip(convolutions, projected, strict=True)]


def _heads(x: Tensor, width: int, shared_by: int = 1) -> Tensor:
    """Return `[B, T, H·D]` as `[B, T, H, D]`, each head `shared_by` times."""
    heads = x.unflatten(-1, (-1, width))
    return heads if shared_by == 1 else heads.repeat_interleave(shared_by, dim=2)


def _gated_output(layer: Any, o_BTHV: Tensor, hidden_states: Tensor) -> Output:
    """Return the end of GLA's and retention's layers: norm, gate where there is one, and product."""
    if not layer.use_output_gate:
        return layer.o_proj(layer.g_norm(o_BTHV).flatten(2)), None, None
    gate = layer.g_proj(hidden_states)
    if layer.fuse_norm_and_gate:
        out = layer.g_norm_swish_gate(o_BTHV, gate.view_as(o_BTHV)).flatten(2)
    else:
        out = layer.g_norm(o_BTHV).flatten(2) * _applied(layer.gate_fn, gate)
    return layer.o_proj(out), None, None


class TraceableGLA(GatedLinearAttention):
    """Source: Yang et al. 2024, "Gated Linear Attention Transformers"."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        q = _heads(q, self.head_k_dim)
        k, g = (_heads(x, self.head_k_dim, self.num_kv_groups) for x in (k, self.gk_proj(hidden_states)))
        v = _heads(v, self.head_v_dim, self.num_kv_groups)
        g = F.logsigmoid(g) / self.gate_logit_normalizer
        g = g if self.clamp_min is None else g.clamp_min(self.clamp_min)
        if self.feature_map_fn is not None:
            q, k = _applied(self.feature_map_fn, q), _applied(self.feature_map_fn, k)
        return _gated_output(self, linear_attention("gla", q, k, v, g, cu_seqlens=cu_seqlens), hidden_states)


class TraceableRetention(MultiScaleRetention):
    """Source: Sun et al. 2023, "Retentive Network"."""

    def forward(self, hidden_states: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        q, k = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim)
        if self.feature_map_fn is not None:
            q, k = _applied(self.feature_map_fn, q), _applied(self.feature_map_fn, k)
        turn = rotation(positions, self.rotary.inv_freq)
        q, k = rotate(q, *turn), rotate(k, *turn)
        if self.num_kv_groups > 1:
            k = k.repeat_interleave(self.num_kv_groups, dim=2)
        v = _heads(v, self.head_v_dim, self.num_kv_groups)
        return _gated_output(self, linear_attention("retention", q, k, v, cu_seqlens=cu_seqlens), hidden_states)


class TraceableDeltaNet(DeltaNet):
    """Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        if not self.use_short_conv:  # else the convolutions have done it
            v = F.silu(v)
        if self.qk_activation != "silu" or not self.use_short_conv:
            q, k = _activated(q, self.qk_activation), _activated(k, self.qk_activation)
        q, k, v = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim), _heads(v, self.head_v_dim)
        beta = self.b_proj(hidden_states).sigmoid() if self.use_beta else torch.ones_like(q[..., 0])
        beta = beta * 2.0 if self.allow_neg_eigval else beta
        o = linear_attention("delta_rule", q, k, v, beta, cu_seqlens=cu_seqlens)
        o = self.o_norm(o, self.g_proj(hidden_states).view_as(o)) if self.use_gate else self.o_norm(o)
        return self.o_proj(o.flatten(2)), None, None


def _activated(x: Tensor, name: str) -> Tensor:
    if name == "elu":
        return torch.where(x >= 0, x + 1, x.clamp_max(0).exp())
    return F.silu(x) if name == "silu" else x.relu() if name == "relu" else x


class TraceableGatedDeltaNet(GatedDeltaNet):
    """Source: Yang et al. 2025, "Gated Delta Networks"."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        if not self.use_short_conv:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k, v = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim), _heads(v, self.head_v_dim)
        decay, beta = self.a_proj(hidden_states), self.b_proj(hidden_states)
        o = linear_attention(
            *("gated_delta_rule", q, k, v, decay, beta, self.A_log, self.dt_bias),
            cu_seqlens=cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        o = self.o_norm(o, self.g_proj(hidden_states).view_as(o)) if self.use_gate else self.o_norm(o)
        return self.o_proj(o.flatten(2)), None, None


class TraceableKDA(KimiDeltaAttention):
    """Source: Kimi Team 2025, "Kimi Linear"."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        if not self.use_short_conv:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k, v = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim), _heads(v, self.head_v_dim)
        decay, beta = _heads(self.f_proj(hidden_states), self.head_k_dim), self.b_proj(hidden_states)
        o = linear_attention(
            *("kda", q, k, v, decay, beta, self.A_log, self.dt_bias),
            cu_seqlens=cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
            safe_gate=self.safe_gate,
            lower_bound=self.lower_bound,
        )
        o = self.o_norm(o, self.g_proj(hidden_states).view_as(o))
        return self.o_proj(o.flatten(2)), None, None


class TraceableGSA(GatedSlotAttention):
    """Source: Zhang et al. 2024, "Gated Slot Attention"."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        q, k, v = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim), _heads(v, self.head_v_dim)
        q, k, v = _applied(self.feature_map, q), _applied(self.feature_map, k), F.silu(v)
        g = F.logsigmoid(_heads(self.f_proj(hidden_states), self.num_slots)) / self.gate_logit_normalizer
        s = (1 - g.exp()).to(g.dtype)
        if self.num_kv_groups > 1:
            k, v, s, g = (x.repeat_interleave(self.num_kv_groups, dim=2) for x in (k, v, s, g))
        o = linear_attention("gsa", q, k, v, s, g, cu_seqlens=cu_seqlens, scale=self.scale)
        return _normed_output(self, F.silu(o.flatten(2)))


class TraceableHGRN2(HGRN2Attention):
    """Source: Qin et al. 2024, "HGRN2"."""

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, lower_bound: Tensor | None = None, **_: Any
    ) -> Output:
        q, f, i = _projected(self, "qfi", hidden_states, cu_seqlens)
        g = F.logsigmoid(f)
        # the first layer's bound is zero; a comparison of the number itself would compile each layer anew
        if lower_bound is not None and not self.is_first:
            g = torch.logaddexp(lower_bound.log(), torch.log1p(-lower_bound) + g)
        k = (1 - g.exp()).to(i.dtype)
        q, k, g = (_heads(x, self.head_f_dim) for x in (F.silu(q), k, g))
        o = linear_attention("gla", q, k, _heads(i, self.head_i_dim), g, cu_seqlens=cu_seqlens)
        return _normed_output(self, o.flatten(2))


def _normed_output(layer: Any, x: Tensor) -> Output:
    norm = layer.g_norm
    return layer.o_proj(_normalised(x, norm.weight, norm.bias, _FUSED_LINEAR_EPS).to(x.dtype)), None, None


_TRACEABLE: dict[type, type] = {
    RMSNorm: TraceableRMSNorm,
    FusedRMSNormGated: TraceableGatedNorm,
    GatedMLP: TraceableGatedMLP,
    GatedLinearAttention: TraceableGLA,
    GatedSlotAttention: TraceableGSA,
    HGRN2Attention: TraceableHGRN2,
    DeltaNet: TraceableDeltaNet,
    GatedDeltaNet: TraceableGatedDeltaNet,
    KimiDeltaAttention: TraceableKDA,
    MultiScaleRetention: TraceableRetention,
}
