"""Mamba-2's layer on flash-linear-attention's own kernels, which keep packed documents apart.

fla's layer calls the package mamba_ssm without a sequence index, and where that is absent loops in plain torch over all
tokens of a chunk. A state space whose decay is one number a head is linear attention with such a decay (Dao and Gu
2024, "Transformers are SSMs", section 5), for which fla has a kernel that takes cu_seqlens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flame.kernels.linear_attention import linear_attention
from flame.kernels.short_convolution import positions_in_documents, short_convolution

ACTIVATIONS = ("silu", "swish")
"""What the short convolution can end with: one thing under two names."""


class PackedMamba2(nn.Module):
    """fla's `Mamba2` of `[B, T, D]`, for training: the same parameters under the same names."""

    is_short_convolution = True  # it has one

    def __init__(self, original: Any) -> None:
        super().__init__()
        assert original.activation in ACTIVATIONS, "check_family refuses others"
        self.in_proj, self.conv1d, self.out_proj = original.in_proj, original.conv1d, original.out_proj
        self.norm = original.norm
        self.A_log, self.D, self.dt_bias = original.A_log, original.D, original.dt_bias
        self.widths = [original.intermediate_size, original.conv_dim, original.num_heads]
        self.num_heads: int = original.num_heads
        self.num_groups: int = original.n_groups
        self.dt_limit: tuple[float, float] = original.dt_limit

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, past_key_values: None = None, **_: Any
    ) -> tuple[Tensor, None, None]:
        assert past_key_values is None, "flame's layers are for training: they read no cache"
        gate, mixed, dt = self.in_proj(hidden_states).split(self.widths, dim=-1)
        mixed = short_convolution(
            mixed,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            positions_BT=positions_in_documents(mixed, cu_seqlens),
            silu=True,
        )
        groups = (mixed.shape[-1] - gate.shape[-1]) // 2
        x, b, c = mixed.split([gate.shape[-1], groups, groups], dim=-1)
        x_BTHP = x.unflatten(-1, (self.num_heads, -1))
        b_BTHN, c_BTHN = self._heads(b), self._heads(c)
        dt_BTH = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.dt_limit)
        decay_BTH = -self.A_log.float().exp() * dt_BTH
        v_BTHP = (x_BTHP * dt_BTH[..., None]).to(x.dtype)
        y_BTHP = linear_attention("simple_gla", c_BTHN, b_BTHN, v_BTHP, decay_BTH, cu_seqlens=cu_seqlens, scale=1.0)
        # one number for each head, or for each of its channels
        y = (y_BTHP + self.D.view(self.num_heads, -1) * x_BTHP).to(x.dtype).flatten(2)
        y = self.norm(y, gate) if self.norm is not None else y * F.silu(gate)
        return self.out_proj(y), None, None

    def _heads(self, grouped: Tensor) -> Tensor:
        """Return what the heads of a group share, `[B, T, G·N]`, for each of them: `[B, T, H, N]`."""
        grouped_BTGN = grouped.unflatten(-1, (self.num_groups, -1))
        heads_BTHN: Tensor = torch.repeat_interleave(grouped_BTGN, self.num_heads // self.num_groups, dim=2)
        return heads_BTHN
