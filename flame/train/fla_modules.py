"""Plain torch in place of a few modules of flash-linear-attention, with the same parameters under the same names.

fla's own attention wants the package flash_attn, and its rotary embedding, norms and SwiGLU are Triton kernels that cut
the graph of a compiled block and run on a GPU only. These run anywhere, keep documents apart, and compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers import Mamba2
from fla.layers import attn as fla_attention
from fla.modules import GatedMLP
from torch import Tensor, nn

from flame.kernels.dispatch import ATTENTION
from flame.kernels.varlen_attention import row_attention
from flame.train.fla_mamba2 import PackedMamba2
from flame.train.joint_products import joint_products


class PlainAttention(nn.Module):
    """Softmax attention with rotary positions: fla's `Attention` of `[B, T, D]`, for training."""

    def __init__(self, original: Any, attention: str) -> None:
        super().__init__()
        self.q_proj, self.k_proj = original.q_proj, original.k_proj
        self.v_proj, self.o_proj = original.v_proj, original.o_proj
        self.q_norm = _plain_norm(original.q_norm) if original.qk_norm else None
        self.k_norm = _plain_norm(original.k_norm) if original.qk_norm else None
        self.head_dim: int = original.head_dim
        self.window: int | None = original.window_size
        self.inv_freq = nn.Buffer(original.rotary.inv_freq, persistent=False)
        self.attend_packed = ATTENTION[attention].run

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
        past_key_values: None = None,
        **_: Any,
    ) -> tuple[Tensor, None, None]:
        assert past_key_values is None, "flame's attention is for training: it reads no cache"
        # values are kept for backward as they are
        projected = [*joint_products(hidden_states, self.q_proj, self.k_proj), self.v_proj(hidden_states)]
        q_BTHD, k_BTGD, v_BTGD = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTGD = self.q_norm(q_BTHD), self.k_norm(k_BTGD)
        turn = rotation(positions, self.inv_freq) if turn is None else turn
        q_BTHD, k_BTGD = rotate(q_BTHD, *turn), rotate(k_BTGD, *turn)
        limits: dict[str, Any] = {"scale": self.head_dim**-0.5, "window": self.window}
        if cu_seqlens is None:
            rows = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
            out_BTHD = row_attention(self.attend_packed, *rows, **limits).transpose(1, 2)
        else:
            packed = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
            out_BTHD = self.attend_packed(*packed, cu_seqlens, max_seqlen, **limits).view_as(q_BTHD)
        return self.o_proj(out_BTHD.flatten(2)), None, None


class PlainGatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) × up(x))`, fla's `GatedMLP` with the activation `swish`."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = original.gate_proj, original.up_proj, original.down_proj

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        gate, up = joint_products(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


def rotation(positions_BT: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines `[B, T, 1, D/2]`, in fp32, by which heads are turned at these positions."""
    angles = (positions_BT[..., None].float() * inv_freq)[:, :, None]
    return angles.cos(), angles.sin()


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads turned in the planes (i, i + D/2), in fp32 and then in the dtype of `x_BTHD`.

    Source: Su et al. 2021, "RoFormer", with the halves paired as in GPT-NeoX.
    """
    first, second = x_BTHD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHD.dtype)


@contextlib.contextmanager
def flash_attention_not_needed() -> Iterator[None]:
    """Let fla's `Attention` be built where the package flash_attn is absent; `replace_attention` must follow."""
    present = fla_attention.flash_attn_func
    fla_attention.flash_attn_func = present or _absent
    try:
        yield
    finally:
        fla_attention.flash_attn_func = present


def replace_attention(model: nn.Module, attention: str) -> None:
    """Put `PlainAttention` in the place of each of fla's `Attention`."""
    _replace(model, fla_attention.Attention, lambda original: PlainAttention(original, attention))


def replace_gated_mlps(model: nn.Module) -> None:
    """Put `PlainGatedMLP` in the place of each of fla's `GatedMLP`."""
    _replace(model, GatedMLP, PlainGatedMLP)


def replace_mamba2(model: nn.Module) -> None:
    """Put `PackedMamba2` in the place of each of fla's `Mamba2`."""
    _replace(model, Mamba2, PackedMamba2)


def _replace(model: nn.Module, kind: type, replacement: Any) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kind):
                setattr(parent, name, replacement(child))


def _plain_norm(original: Any) -> nn.RMSNorm:
    norm = nn.RMSNorm(original.hidden_size, eps=original.eps, device="meta")
    norm.weight = original.weight
    return norm


def _absent(*_: Any, **__: Any) -> None:
    raise AssertionError("fla's Attention is replaced before it is called")
