"""Causal depthwise convolution over few tokens, within documents, as linear attention has before its queries and keys.

It does little arithmetic with each number that it reads, so its cost is that of memory: forward reads and writes each
number once, backward reads two and writes one. A token's position in its document, made once from `cu_seqlens` on the
device, says which taps see it: no program looks for a document's start, and nothing waits for the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.kernels.dispatch import CONVOLUTIONS, ConvolutionImplementation, choose_convolution


def short_convolution(
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    *,
    positions_BT: Tensor,
    silu: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Return y `[B, T, C]`, y_t = Σ_j w_{W−1−j} x_{t−j} + bias over j < W within t's document; or SiLU of that.

    `positions_BT` are integers: how far each token is from the start of its document, as `positions_in_documents`
    makes them. `implementation` is a name in `flame.kernels.dispatch.CONVOLUTIONS`, or "auto". Sums are in fp32 (fp64
    for fp64 inputs), the result and its gradients in the dtypes of what they belong to. A token's result and gradient
    have the same bits whatever other documents hold, and so have those of the weight from call to call. Rows of `x_BTC`
    may lie apart in memory, as those of a part of a wider projection do. Backward keeps only the inputs.
    """
    if weight_CW.shape[1] == 1:
        weight_CW = F.pad(weight_CW, (1, 0))  # kernels look back at least once
    y_TC = _forward(x_BTC.flatten(0, 1), weight_CW, bias_C, positions_BT.flatten(), silu, implementation)
    return y_TC.view(x_BTC.shape)


def positions_in_documents(x_BTC: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return how far each token is from its document's start, int32 `[B, T]`; without `cu_seqlens` from its row's.

    With `cu_seqlens` B is 1; offsets that repeat are empty documents. Nothing waits for the device.
    """
    rows, length, _ = x_BTC.shape
    index_T = torch.arange(length, dtype=torch.int32, device=x_BTC.device)
    if cu_seqlens is None:
        return index_T.expand(rows, length)
    assert rows == 1, "packed documents are one row"
    offsets = cu_seqlens.int()
    # all offsets, not those from the second on: torch 2.11 compiles a look-up in a slice as one in the whole tensor
    # (pytorch issue 160964)
    return (index_T - offsets[torch.bucketize(index_T, offsets, right=True) - 1])[None]


@torch.library.custom_op("flame::short_convolution", mutates_args=())
def _forward(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool, implementation: str
) -> Tensor:
    return _chosen(implementation, x_TC.device, x_TC.dtype).forward(x_TC, weight_CW, bias_C, positions_T, silu)


@torch.library.custom_op("flame::short_convolution_backward", mutates_args=())
def _backward(
    d_y_TC: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    positions_T: Tensor,
    silu: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weight and of the bias, which is empty where there is none."""
    d_x_TC, d_weight_CW, d_bias_C = _chosen(implementation, x_TC.device, x_TC.dtype).backward(
        d_y_TC, x_TC, weight_CW, bias_C, positions_T, silu
    )
    d_weight, d_bias = _gradients_like(weight_CW, bias_C)
    d_weight.copy_(d_weight_CW)
    return d_x_TC, d_weight, d_bias if d_bias_C is None else d_bias.copy_(d_bias_C)


@cache  # it looks for packages on the disk, and is asked in each layer
def _chosen(implementation: str, device: torch.device, dtype: torch.dtype) -> ConvolutionImplementation:
    return CONVOLUTIONS[choose_convolution(implementation, device=device, dtype=dtype)]


def _gradients_like(weight_CW: Tensor, bias_C: Tensor | None) -> tuple[Tensor, Tensor]:
    empty = weight_CW.new_empty(0) if bias_C is None else bias_C.new_empty(bias_C.shape)
    return weight_CW.new_empty(weight_CW.shape), empty


@_forward.register_fake
def _(x_TC: Tensor, *_: Any) -> Tensor:
    return x_TC.new_empty(x_TC.shape)


@_backward.register_fake
def _(d_y_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x_TC.new_empty(x_TC.shape), *_gradients_like(weight_CW, bias_C)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu, ctx.implementation = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_y_TC: Tensor) -> tuple[Tensor | None, ...]:
    d_x_TC, d_weight_CW, d_bias_C = _backward(d_y_TC, *ctx.saved_tensors, ctx.silu, ctx.implementation)
    return d_x_TC, d_weight_CW, None if ctx.saved_tensors[2] is None else d_bias_C, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep_inputs)

OPERATOR = torch.ops.flame.short_convolution.default
