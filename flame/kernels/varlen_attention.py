"""Causal attention over packed documents: each sequence sees itself and nothing else, and no row-wide mask is built.

The implementations differ in speed and in where they run; `dispatch.py` lists and chooses them. Those of a GPU are
operators, so that a compiled block holds them in its graph. The longest sequence is a number that changes with each
batch, so it travels as a tensor in CPU memory: compiled code keeps no guard on its value, and reading it waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_PADDED_OFFSETS = 256
_QUERY_BLOCK = 512
_NO_WINDOW = 0

Attention = Callable[..., Tensor]
"""`(q_THD, k_TGD, v_TGD, cu_seqlens, max_seqlen, *, scale, window=None, softcap=None) -> out_THD`.

With G key heads, a divisor of H; `cu_seqlens` int32 on the device; `max_seqlen` as `longest` returns it. A token sees
itself and the `window` − 1 tokens before it. `softcap` c makes scores c·tanh(scores / c).
"""


def pad_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Return `cu_seqlens` with its last offset repeated until its length is a power of two, at least 256.

    The sequences that this adds are empty. Compiled code sees one length, or a few, instead of another in every batch.
    No wait for the device.
    """
    length = cu_seqlens.shape[0]
    missing = max(MIN_PADDED_OFFSETS, 1 << (length - 1).bit_length()) - length
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing)))


def longest(max_seqlen: int) -> Tensor:
    """Return the true longest sequence as attention takes it. A longer one makes torch's kernels launch empty tiles."""
    return torch.tensor(max_seqlen, dtype=torch.int32, device="cpu")


def row_attention(
    attend: Attention,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention `[B, H, T, D]` over whole rows, for batches without document masks.

    By torch's `scaled_dot_product_attention`; it knows neither windows nor soft caps, and with those each row is a
    packed sequence of `attend`.
    """
    if window is None and softcap is None:
        grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, scale=scale, enable_gqa=grouped)
    rows, _, length, _ = q_BHTD.shape
    offsets = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q_BHTD.device)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD))
    out_THD = attend(*packed, offsets, longest(length), scale=scale, window=window, softcap=softcap)
    return out_THD.unflatten(0, (rows, length)).transpose(1, 2)


# ---- torch's own FlashAttention -------------------------------------------------------------------------------------


def torch_varlen_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The kernels behind torch's `varlen_attn`: CUDA, bf16 or fp16, heads of up to 256, no soft cap.

    Their backward adds up key gradients in an order that varies, but for `torch.use_deterministic_algorithms(True)`.
    """
    assert softcap is None, "torch's varlen attention has no soft cap"
    out_THD, _ = _torch_varlen(q_THD, k_TGD, v_TGD, cu_seqlens, max_seqlen, scale, window or _NO_WINDOW)
    return out_THD


@torch.library.custom_op("flame::torch_varlen", mutates_args=())
def _torch_varlen(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, max_seqlen: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return attention and the log of its softmax's denominator, `[H, T]`."""
    length = int(max_seqlen)
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_TGD,
        v_TGD,
        cu_seqlens,
        cu_seqlens,
        length,
        length,
        0.0,
        window == _NO_WINDOW,
        False,
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )
    return out_THD, lse_HT


@torch.library.custom_op("flame::torch_varlen_backward", mutates_args=())
def _torch_varlen_backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    length = int(max_seqlen)
    no_dropout = (q_THD.new_zeros(2, dtype=torch.uint64), q_THD.new_empty(0))
    d_q_THD, d_k_TGD, d_v_TGD = torch.ops.aten._flash_attention_backward(
        d_out_THD,
        q_THD,
        k_TGD,
        v_TGD,
        out_THD,
        lse_HT,
        cu_seqlens,
        cu_seqlens,
        length,
        length,
        0.0,
        window == _NO_WINDOW,
        *no_dropout,
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )
    return d_q_THD, d_k_TGD, d_v_TGD


# ---- FlashAttention-4 -----------------------------------------------------------------------------------------------


def fa4_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """FlashAttention-4, the package `flash-attn-4`: CUDA, bf16 or fp16, heads of up to 256.

    On these GPUs it needs no longest sequence: it makes its tiles from the offsets.
    """
    out_THD, _ = _fa4(q_THD, k_TGD, v_TGD, cu_seqlens, scale, window or _NO_WINDOW, softcap or 0.0)
    return out_THD


@torch.library.custom_op("flame::fa4", mutates_args=())
def _fa4(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return attention and the log of its softmax's denominator, `[H, T]`."""
    from flash_attn.cute.interface import _flash_attn_fwd  # imports a compiler: seconds

    out_THD, lse_HT, *_ = _flash_attn_fwd(
        q_THD,
        k_TGD,
        v_TGD,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        softmax_scale=scale,
        causal=True,
        softcap=softcap or None,
        window_size_left=None if window == _NO_WINDOW else window - 1,
        return_lse=True,
    )
    return out_THD, lse_HT


@torch.library.custom_op("flame::fa4_backward", mutates_args=())
def _fa4_backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    d_q_THD, d_k_TGD, d_v_TGD = _flash_attn_bwd(
        q_THD,
        k_TGD,
        v_TGD,
        out_THD,
        d_out_THD,
        lse_HT,
        scale,
        True,
        softcap,
        window_size_left=None if window == _NO_WINDOW else window - 1,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return d_q_THD, d_k_TGD, d_v_TGD


# ---- what both operators are to a graph -----------------------------------------------------------------------------


def _out_and_lse(q_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_HT = q_THD.new_empty(q_THD.shape[1], q_THD.shape[0], dtype=torch.float32)
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format), lse_HT


def _like_inputs(d_out_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q_THD), torch.empty_like(k_TGD), torch.empty_like(v_TGD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TGD, v_TGD, *others = inputs
    ctx.save_for_backward(q_THD, k_TGD, v_TGD, *output, *(x for x in others if isinstance(x, Tensor)))
    ctx.settings = [x for x in others if not isinstance(x, Tensor)]
    ctx.num_others = len(others)


def _backward_by(operator: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, d_out_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = operator(d_out_THD.contiguous(), *ctx.saved_tensors, *ctx.settings)
        return *gradients, *(None,) * ctx.num_others

    return backward


for _forward, _backward in ((_torch_varlen, _torch_varlen_backward), (_fa4, _fa4_backward)):
    _forward.register_fake(_out_and_lse)
    _backward.register_fake(_like_inputs)
    _forward.register_autograd(_backward_by(_backward), setup_context=_keep)


# ---- anywhere -------------------------------------------------------------------------------------------------------


@torch.compiler.disable
def sdpa_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One `scaled_dot_product_attention` a sequence, on any device and in any dtype: exact isolation by construction.

    Cost: a call a sequence, and on a GPU a wait for `cu_seqlens`. Sequences longer than a window, and all with a soft
    cap, go by blocks of queries, each with a mask over the keys that it sees. `torch.compile` leaves this function out
    of its graphs, for the number of calls is data.
    """
    lengths = [stop - start for start, stop in pairwise(cu_seqlens.tolist()) if stop > start]
    grouped = q_THD.shape[1] != k_TGD.shape[1]
    # split rather than index: its backward is one concatenation, not a tensor of zeros a sequence
    sequences = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (q_THD, k_TGD, v_TGD)), strict=True)
    outs = [
        _by_blocks(q, k, v, scale, window, softcap)
        if softcap is not None or (window is not None and q.shape[2] > window)
        else F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        for q, k, v in sequences
    ]
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention `[1, H, L, D]` within one sequence, a block of queries at a time."""
    length = q.shape[2]
    block = max(_QUERY_BLOCK, window or 0)
    outs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = 0 if window is None else max(0, start - window + 1)
        index = torch.arange(first, stop, device=q.device)
        distance = index[start - first :, None] - index[None, :]
        visible = (distance >= 0) & (distance < (window or length))
        outs.append(_masked(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], visible, scale, softcap))
    return torch.cat(outs, dim=2)


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if grouped else x for x in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype) @ v
