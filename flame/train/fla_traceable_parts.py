"""Plain forms of flash-linear-attention's norms, activations and gated MLP, for blocks that are to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fla.modules import FusedRMSNormGated, GatedMLP, RMSNorm
from fla.modules.activations import ACT2FN
from fla.modules.feature_map import ReLUFeatureMap, SwishFeatureMap
from fla.modules.layernorm_gated import RMSNormGated
from torch import Tensor, nn

from flame.train.joint_products import joint_products


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the root mean square norm of `x` in fp32. Source: Zhang and Sennrich 2019."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def squared_relu(x: Tensor) -> Tensor:
    """Source: So et al. 2021, "Primer"."""
    return F.relu(x).square()


_PLAIN: dict[Any, Callable[[Tensor], Tensor]] = {
    ACT2FN["relu"]: F.relu,
    ACT2FN["sigmoid"]: torch.sigmoid,
    ACT2FN["swish"]: F.silu,
    ACT2FN["sqrelu"]: squared_relu,
    ReLUFeatureMap: F.relu,
    SwishFeatureMap: F.silu,
}


def plain(function: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the plain form of one of fla's activations or feature maps, or None."""
    return _PLAIN.get(type(function) if isinstance(function, nn.Module) else function)


class TraceableRMSNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
        """Return the norm of `x`, or of `x + residual`, and with `prenorm` that sum too."""
        x = x if residual is None else x + residual
        y = normalised(x, self.weight, self.bias, self.eps).to(x.dtype)
        return (y, x) if prenorm else y


class TraceableGatedNorm(FusedRMSNormGated):
    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """Return `norm(x) · σ(g)`, or `norm(x) · g · σ(g)` with the activation swish."""
        gate = g.float().sigmoid() if self.activation == "sigmoid" else F.silu(g.float())
        return (normalised(x, self.weight, None, self.eps) * gate).to(x.dtype)


class TraceableMamba2Norm(RMSNormGated):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return `norm(x · silu(z))`, or `norm(x) · silu(z)` with `norm_before_gate`, within groups of channels."""
        gate = F.silu(z.float())
        y = x.float() if self.norm_before_gate else x.float() * gate
        groups = y.unflatten(-1, (-1, self.group_size or x.shape[-1]))
        y = normalised(groups, None, None, self.eps).flatten(-2) * self.weight.float()
        return (y * gate if self.norm_before_gate else y).to(x.dtype)


class TraceableGatedMLP(GatedMLP):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        gate, up = joint_products(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out
