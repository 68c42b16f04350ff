"""RWKV-7's layers in forms that `torch.compile` holds whole, as `flame/train/fla_traceable.py` has the others.

Source: Peng et al. 2025, "RWKV-7 Goose".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fla.layers import RWKV7Attention
from fla.models.rwkv7.modeling_rwkv7 import RWKV7FeedForward
from fla.modules import GroupNorm, LayerNorm
from torch import Tensor

from flame.kernels.linear_attention import linear_attention
from flame.train.fla_traceable_parts import normalised

_LOWEST_DECAY = -0.6065306597126334  # −exp(−1/2), of the logarithm of a step's decay


def steps_back(x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Return what leads from a token to the one before it in its document, or to zero: `x_{t−1} − x_t`."""
    before = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
    return torch.where(positions_BT[..., None] == 0, 0.0, before) - x_BTD


class TraceableLayerNorm(LayerNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
        """Return the norm of `x`, or of `x + residual`, and with `prenorm` that sum too."""
        x = x if residual is None else x + residual
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return (y, x) if prenorm else y


class TraceableGroupNorm(GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.num_groups, -1)).float()
        if self.is_rms_norm:
            y = normalised(groups, None, None, self.eps)
        else:
            y = F.layer_norm(groups, groups.shape[-1:], eps=self.eps)
        y = y.flatten(-2)
        y = y if self.weight is None else y * self.weight.float()
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class TraceableFeedForward(RWKV7FeedForward):
    def forward(
        self, x: Tensor, attention_mask: None = None, state: None = None, *_: Any, positions: Tensor, **__: Any
    ) -> tuple[Tensor, None]:
        key = self.key(x.addcmul(steps_back(x, positions), self.x_k))
        return self.value(self.act_fn(key)), None


class TraceableRWKV7(RWKV7Attention):
    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        v_first: Tensor,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None, None, Tensor]:
        back = steps_back(hidden_states, positions)
        mixes = (self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)
        xr, xw, xk, xv, xa, xg = (torch.addcmul(hidden_states, back, mix) for mix in mixes)
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        decay = _LOWEST_DECAY * self.w_lora(xw).sigmoid()
        if self.is_first:
            v_first = v
        else:
            v = torch.lerp(v, v_first, self.v_lora(xv).sigmoid())
        a, gate = self.a_lora(xa).sigmoid(), self.g_lora(xg)
        removed = (k * self.k_k).unflatten(-1, (-1, self.head_dim))
        removed = self._unit(removed)
        k = k.addcmul(k * (a - 1), self.k_a)
        r, decay, k, a = (x.unflatten(-1, (-1, self.head_dim)) for x in (r, decay, k, a))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        o = linear_attention(
            *("rwkv7", r, k, v, -removed, removed * a, decay),
            cu_seqlens=cu_seqlens,
            scale=1.0,
            lower_bound=_LOWEST_DECAY,
        )
        o = self._normed(o.flatten(2))
        bonus = ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(2)
        return self.o_proj((o + bonus) * gate), None, None, v_first

    def _unit(self, x: Tensor) -> Tensor:
        """Return vectors of length 1, as fla's fused form (`fuse_norm`) or torch's makes them."""
        if not self.fuse_norm:
            return F.normalize(x, dim=-1, p=2.0)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def _normed(self, o: Tensor) -> Tensor:
        normed: Tensor = self.g_norm(o) if self.fuse_norm else self.g_norm(o.flatten(0, 1)).view_as(o)
        return normed
