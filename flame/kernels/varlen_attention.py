"""Causal attention over packed documents: each sequence sees itself and nothing else, and no mask is ever built.

The implementations differ in speed and in where they run; `dispatch.py` lists and chooses them. All take the *true*
longest sequence: a longer one makes the GPU kernels launch work for tiles that are empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

MIN_PADDED_OFFSETS = 256
# torch 2.12 and newer want to be told of fewer key heads; 2.11 takes them as they are.
_NAMES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters

Attention = Callable[..., Tensor]
"""`(q_THD, k_TGD, v_TGD, cu_seqlens, max_seqlen, *, scale) -> out_THD`, with G key heads, a divisor of H."""


def pad_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Return `cu_seqlens` with its last offset repeated until its length is a power of two, at least 256.

    The sequences that this adds are empty. Compiled code sees one length, or a few, instead of another in every batch.
    No wait for the device.
    """
    length = cu_seqlens.shape[0]
    missing = max(MIN_PADDED_OFFSETS, 1 << (length - 1).bit_length()) - length
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing)))


def torch_varlen_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float
) -> Tensor:
    """FlashAttention through torch's own `varlen_attn`: CUDA, bf16 or fp16, heads of up to 256; in-graph for compile.

    Its backward adds up key gradients in an order that varies, unless `torch.use_deterministic_algorithms(True)` is on.
    """
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if _NAMES_GROUPED_HEADS:
        options["enable_gqa"] = q_THD.shape[1] != k_TGD.shape[1]
    out_THD: Tensor = varlen_attn(  # type: ignore[assignment]
        q_THD, k_TGD, v_TGD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options
    )
    return out_THD


@torch.compiler.disable
def sdpa_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float
) -> Tensor:
    """One `scaled_dot_product_attention` a sequence, on any device and in any dtype: exact isolation by construction.

    Cost: a call a sequence, and on a GPU a wait for `cu_seqlens`. `torch.compile` leaves it out of its graphs, for the
    number of calls is data.
    """
    lengths = [stop - start for start, stop in pairwise(cu_seqlens.tolist()) if stop > start]
    grouped = q_THD.shape[1] != k_TGD.shape[1]
    # split rather than index: its backward is one concatenation, not a tensor of zeros a sequence
    sequences = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (q_THD, k_TGD, v_TGD)), strict=True)
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        for q, k, v in sequences
    ]
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def causal_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, scale: float) -> Tensor:
    """Causal attention `[B, H, T, D]` over whole rows, for batches without document masks: torch's own SDPA."""
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, scale=scale, enable_gqa=grouped)
