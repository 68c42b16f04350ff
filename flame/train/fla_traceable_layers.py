"""Layers of flash-linear-attention, `[B, T, D]` to the same, in forms that `torch.compile` holds whole.

They are for training: no cache, no mask of padding. Parameters and settings are fla's.
"""

from __future__ import annotations

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
from torch import Tensor, nn

from flame.kernels.linear_attention import linear_attention
from flame.train.fla_modules import rotate, rotation
from flame.train.fla_traceable_parts import normalised
from flame.train.joint_products import narrow_products

Output = tuple[Tensor, None, None]
_FUSED_LINEAR_EPS = 1e-5
"""What fla's product after a norm takes, whatever the norm's own setting is."""


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
        out = layer.g_norm(o_BTHV).flatten(2) * layer.gate_fn(gate)
    return layer.o_proj(out), None, None


def _delta_output(layer: Any, o_BTHV: Tensor, hidden_states: Tensor, *, gated: bool) -> Output:
    """Return the end of the delta rules' layers: norm, gated or not, and product."""
    gates = [layer.g_proj(hidden_states).view_as(o_BTHV)] if gated else []
    return layer.o_proj(layer.o_norm(o_BTHV, *gates).flatten(2)), None, None


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
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        return _gated_output(self, linear_attention("gla", q, k, v, g, cu_seqlens=cu_seqlens), hidden_states)


class TraceableRetention(MultiScaleRetention):
    """Source: Sun et al. 2023, "Retentive Network"."""

    def forward(self, hidden_states: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        q, k = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
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
        return _delta_output(self, o, hidden_states, gated=self.use_gate)


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
        decay, beta = narrow_products(hidden_states, self.a_proj, self.b_proj)
        o = linear_attention(
            *("gated_delta_rule", q, k, v, decay, beta, self.A_log, self.dt_bias),
            cu_seqlens=cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        return _delta_output(self, o, hidden_states, gated=self.use_gate)


def replace_gated_delta_nets(model: nn.Module) -> None:
    """Make `TraceableGatedDeltaNet` of each of fla's `GatedDeltaNet`, for eager training too.

    It has no formula that only a compiler makes fast, and fla refuses its own backward on Hopper with some compilers
    (`flame/kernels/hopper_check.py`).
    """
    for module in model.modules():
        if type(module) is GatedDeltaNet and module.mode == "chunk":
            module.__class__ = TraceableGatedDeltaNet


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
        return _delta_output(self, o, hidden_states, gated=True)


class TraceableGSA(GatedSlotAttention):
    """Source: Zhang et al. 2024, "Gated Slot Attention"."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Output:
        q, k, v = _projected(self, "qkv", hidden_states, cu_seqlens)
        q, k, v = _heads(q, self.head_k_dim), _heads(k, self.head_k_dim), _heads(v, self.head_v_dim)
        q, k, v = self.feature_map(q), self.feature_map(k), F.silu(v)
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
    return layer.o_proj(normalised(x, norm.weight, norm.bias, _FUSED_LINEAR_EPS).to(x.dtype)), None, None
