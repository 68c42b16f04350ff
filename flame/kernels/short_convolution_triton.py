"""The short convolution of `short_convolution.py` in Triton: forward reads and writes each token once, and so backward.

A program walks along a run of tokens with `WIDTH` channels side by side. What a row needs of the rows before it, and
what backward still owes to them, stays in registers: no row is read again for another tap, and the activation, which
costs most, is computed once a row. Rows come in groups of `DEPTH`, each asked for before the one before is computed.

A row's position in its document says which taps see it. Groups of rows that all have their document behind them take a
branch without selections; both branches multiply and add in the same order, so that a token's result does not depend
on where in a row its document lies.

Backward starts each run anew. Of the gradient of a row it can write the last once it has seen the `W` − 1 rows after
it, so a run reads those of the next as well. Each run writes its part of the taps' gradient, in fp32, and a second pass
adds up the parts in one order.
"""
# mypy: disable-error-code="assignment,misc"
# (in kernels tuples grow, for Triton has no lists)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Walk(NamedTuple):
    """How a kernel divides its work."""

    run: int
    """Tokens of a program; this and the others are powers of two."""
    depth: int
    """Rows that are loaded at a time, at least."""
    width: int
    """Channels of a program, at most."""
    lanes: int
    """Channels of a thread."""


FORWARD = Walk(run=64, depth=4, width=512, lanes=4)
BACKWARD = Walk(run=128, depth=4, width=256, lanes=2)
_NARROWEST = 128
_MOST_RUNS = 65_535
"""What the second dimension of a grid can have."""


def triton_forward(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool, walk: Walk = FORWARD
) -> Tensor:
    """Return the convolution of `short_convolution`, `[T, C]` in the dtype of `x_TC`, which is bf16, fp16 or fp32."""
    y_TC = x_TC.new_empty(x_TC.shape)
    if y_TC.numel() == 0:
        return y_TC
    x_TC = _side_by_side(x_TC)
    grid, constants = _division(x_TC, weight_CW, bias_C, walk)
    _forward[grid](
        x_TC,
        weight_CW.contiguous(),
        bias_C,
        positions_T.contiguous(),
        y_TC,
        *x_TC.shape,
        x_TC.stride(0),
        SILU=silu,
        **constants,
    )
    return y_TC


def triton_backward(
    d_y_TC: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    positions_T: Tensor,
    silu: bool,
    walk: Walk = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of `x_TC`, and in fp32 of the taps `[C, W]` and of the bias, if there is one."""
    num_channels, num_taps = weight_CW.shape
    d_x_TC = x_TC.new_empty(x_TC.shape)
    grid, constants = _division(x_TC, weight_CW, bias_C, walk)
    num_runs = triton.cdiv(x_TC.shape[0], constants["RUN"])
    parts_RSC = x_TC.new_empty(num_runs, num_taps + (bias_C is not None), num_channels, dtype=torch.float32)
    if d_x_TC.numel():
        x_TC, d_y_TC = _side_by_side(x_TC), _side_by_side(d_y_TC)
        _backward[grid](
            d_y_TC,
            x_TC,
            weight_CW.contiguous(),
            bias_C,
            positions_T.contiguous(),
            d_x_TC,
            parts_RSC,
            *x_TC.shape,
            d_y_TC.stride(0),
            x_TC.stride(0),
            SILU=silu,
            **constants,
        )
    sums_SC = parts_RSC.sum(0)
    return d_x_TC, sums_SC[:num_taps].t(), None if bias_C is None else sums_SC[num_taps]


def _side_by_side(x_TC: Tensor) -> Tensor:
    """Return `x_TC` with channels side by side; rows may lie apart, as those of a part of a projection do."""
    return x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()


def _division(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, walk: Walk
) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Return the grid and the constants of a launch. Programs side by side read the same rows."""
    (num_tokens, num_channels), num_taps = x_TC.shape, weight_CW.shape[1]
    assert num_taps > 1, "a kernel's queue of rows is not empty"
    depth = max(walk.depth, triton.next_power_of_2(num_taps - 1))  # those that the last rows of a run owe something to
    run = max(depth, min(walk.run, triton.next_power_of_2(num_tokens)))
    even = num_channels & -num_channels  # the largest power of two that divides them, where that is not too narrow
    width = min(walk.width, even if even >= _NARROWEST else triton.next_power_of_2(num_channels))
    run = max(run, triton.next_power_of_2(triton.cdiv(num_tokens, _MOST_RUNS)))
    return (triton.cdiv(num_channels, width), triton.cdiv(num_tokens, run)), {
        "W": num_taps,
        "HAS_BIAS": bias_C is not None,
        "RUN": run,
        "DEPTH": depth,
        "WIDTH": width,
        "num_warps": max(1, width // (32 * walk.lanes)),
    }


@triton.jit
def _there(channels, row_is_there):  # type: ignore[no-untyped-def]
    """Return which channels of a row can be read or written."""
    return channels[0] < tl.where(row_is_there, channels[1], 0)


@triton.jit
def _filter(weight_ptr, bias_ptr, channels, W: tl.constexpr, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the taps, that of a row itself first, and the bias."""
    channel, num_channels = channels
    taps = ()
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + channel * W + (W - 1 - j), mask=channel < num_channels, other=0.0)
        taps += (tap.to(tl.float32),)
    bias = tl.zeros_like(taps[0])
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=channel < num_channels, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _past(x_ptr, stride, first, channels, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows before the first of a run, the nearest first; zeros before token 0."""
    past = ()
    for j in tl.static_range(1, W):
        row = tl.load(x_ptr - j * stride + channels[0], mask=_there(channels, first >= j), other=0.0)
        past += (row.to(tl.float32),)
    return past


@triton.jit
def _pushed(row, past, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows before the next one."""
    pushed = (row,)
    for j in tl.static_range(W - 2):
        pushed += (past[j],)
    return pushed


@triton.jit
def _rows(x_ptr, stride, step, left, channels, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a group of rows as they are, from row `step` of the `left` that there are."""
    rows = ()
    for i in tl.static_range(DEPTH):
        at = x_ptr + (step + i) * stride + channels[0]
        rows += (tl.load(at, mask=_there(channels, step + i < left), other=0.0),)
    return rows


@triton.jit
def _positions(positions_ptr, step, left, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the positions of a group of rows; 0 where there is none."""
    positions = ()
    for i in tl.static_range(DEPTH):
        positions += (tl.load(positions_ptr + step + i, mask=step + i < left, other=0).to(tl.int32),)
    return positions


@triton.jit
def _least(positions, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    least = positions[0]
    for i in tl.static_range(1, DEPTH):
        least = tl.minimum(least, positions[i])
    return least


@triton.jit
def _seen(past, position, W: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows before one with zeros for those of other documents."""
    seen = ()
    for j in tl.static_range(1, W):
        if MASKED:
            seen += (tl.where(position >= j, past[j - 1], 0.0),)
        else:
            seen += (past[j - 1],)
    return seen


@triton.jit
def _convolved(row, seen, taps, bias, W: tl.constexpr):  # type: ignore[no-untyped-def]
    z = tl.fma(taps[0], row, bias)
    for j in tl.static_range(1, W):
        z = tl.fma(taps[j], seen[j - 1], z)
    return z


@triton.jit
def _sigmoid(z):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + exp(−z)): the square of a reciprocal root takes half the instructions of a division."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2_E))
    return root * root


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_group(  # type: ignore[no-untyped-def]
    y_ptr,
    step,
    left,
    channels,
    taps,
    bias,
    rows,
    positions,
    past,
    W: tl.constexpr,
    SILU: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write the results of a group of rows, and return the rows before the next."""
    for i in tl.static_range(DEPTH):
        row = rows[i].to(tl.float32)
        z = _convolved(row, _seen(past, positions[i], W, MASKED), taps, bias, W)
        if SILU:
            z = z * _sigmoid(z)
        at = y_ptr + (step + i) * channels[1] + channels[0]
        tl.store(at, z.to(y_ptr.dtype.element_ty), mask=_there(channels, step + i < left))
        past = _pushed(row, past, W)
    return past


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    positions_ptr,
    y_ptr,
    num_tokens,
    num_channels,
    x_stride,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    RUN: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    channels = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), num_channels)
    run = tl.program_id(1)
    first = run * RUN
    left = tl.minimum(num_tokens - first, RUN)
    x_ptr += first.to(tl.int64) * x_stride
    y_ptr += first.to(tl.int64) * num_channels
    positions_ptr += first

    rows = _rows(x_ptr, x_stride, 0, left, channels, DEPTH)
    positions = _positions(positions_ptr, 0, left, DEPTH)
    past = _past(x_ptr, x_stride, first, channels, W)
    taps, bias = _filter(weight_ptr, bias_ptr, channels, W, HAS_BIAS)
    for step in range(0, RUN, DEPTH):
        next_rows = _rows(x_ptr, x_stride, step + DEPTH, left, channels, DEPTH)
        next_positions = _positions(positions_ptr, step + DEPTH, left, DEPTH)
        if _least(positions, DEPTH) >= W - 1:
            past = _forward_group(
                y_ptr, step, left, channels, taps, bias, rows, positions, past, W, SILU, DEPTH, False
            )  # fmt: skip
        else:
            past = _forward_group(
                y_ptr, step, left, channels, taps, bias, rows, positions, past, W, SILU, DEPTH, True
            )  # fmt: skip
        rows, positions = next_rows, next_positions


# ---- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def _backward_row(  # type: ignore[no-untyped-def]
    row, d_y, position, past, owed, taps, bias, W: tl.constexpr, SILU: tl.constexpr, MASKED: tl.constexpr
):
    """Return a row's gradient before the activation, what its taps saw, and what is owed to it and to those before.

    `owed` are the gradients of the `W` − 1 rows before this one, the nearest first, as far as the rows before this one
    make them. Of those that are returned, this row's own first, the last is whole.
    """
    seen = _seen(past, position, W, MASKED)
    d_z = d_y
    if SILU:
        z = _convolved(row, seen, taps, bias, W)
        s = _sigmoid(z)
        d_z = d_y * tl.fma(z * s, 1.0 - s, s)
    still = (taps[0] * d_z,)
    for j in tl.static_range(1, W):
        if MASKED:
            still += (tl.fma(taps[j], tl.where(position >= j, d_z, 0.0), owed[j - 1]),)
        else:
            still += (tl.fma(taps[j], d_z, owed[j - 1]),)
    return d_z, seen, still


@triton.jit
def _write_whole(d_x_ptr, row, left, channels, still, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the gradient that is whole once `row` is seen; before the run's first it is the run before that writes."""
    done = row - (W - 1)
    at = d_x_ptr + done * channels[1] + channels[0]
    mask = _there(channels, (done >= 0) & (done < left))
    tl.store(at, still[W - 1].to(d_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_group(  # type: ignore[no-untyped-def]
    d_x_ptr,
    step,
    left,
    channels,
    taps,
    bias,
    rows,
    d_ys,
    positions,
    past,
    owed,
    sums,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write the gradients that a group of rows makes whole, and return the rows before the next, and what is owed."""
    for i in tl.static_range(DEPTH):
        row = rows[i].to(tl.float32)
        d_y = d_ys[i].to(tl.float32)
        d_z, seen, still = _backward_row(row, d_y, positions[i], past, owed, taps, bias, W, SILU, MASKED)
        _write_whole(d_x_ptr, step + i, left, channels, still, W)
        added = (tl.fma(d_z, row, sums[0]),)
        for j in tl.static_range(1, W):
            added += (tl.fma(d_z, seen[j - 1], sums[j]),)
        if HAS_BIAS:
            added += (sums[W] + d_z,)
        past, owed, sums = _pushed(row, past, W), still[: W - 1], added
    return past, owed, sums


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d_y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    positions_ptr,
    d_x_ptr,
    parts_ptr,
    num_tokens,
    num_channels,
    d_y_stride,
    x_stride,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    RUN: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    channels = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), num_channels)
    run = tl.program_id(1)
    first = run * RUN
    left = tl.minimum(num_tokens - first, RUN + W - 1)
    x_ptr += first.to(tl.int64) * x_stride
    d_y_ptr += first.to(tl.int64) * d_y_stride
    d_x_ptr += first.to(tl.int64) * num_channels
    positions_ptr += first

    rows = _rows(x_ptr, x_stride, 0, left, channels, DEPTH)
    d_ys = _rows(d_y_ptr, d_y_stride, 0, left, channels, DEPTH)
    positions = _positions(positions_ptr, 0, left, DEPTH)
    past = _past(x_ptr, x_stride, first, channels, W)
    taps, bias = _filter(weight_ptr, bias_ptr, channels, W, HAS_BIAS)
    owed, sums = (), ()
    for _ in tl.static_range(W - 1):
        owed += (tl.zeros_like(bias),)
    for _ in tl.static_range(W + HAS_BIAS):
        sums += (tl.zeros_like(bias),)
    for step in range(0, RUN, DEPTH):
        next_rows = _rows(x_ptr, x_stride, step + DEPTH, left, channels, DEPTH)
        next_d_ys = _rows(d_y_ptr, d_y_stride, step + DEPTH, left, channels, DEPTH)
        next_positions = _positions(positions_ptr, step + DEPTH, left, DEPTH)
        if _least(positions, DEPTH) >= W - 1:
            past, owed, sums = _backward_group(
                d_x_ptr, step, left, channels, taps, bias, rows, d_ys, positions, past, owed, sums,
                W, HAS_BIAS, SILU, DEPTH, False,
            )  # fmt: skip
        else:
            past, owed, sums = _backward_group(
                d_x_ptr, step, left, channels, taps, bias, rows, d_ys, positions, past, owed, sums,
                W, HAS_BIAS, SILU, DEPTH, True,
            )  # fmt: skip
        rows, d_ys, positions = next_rows, next_d_ys, next_positions
    # the first rows of the next run, for what they owe to the last of this one
    for i in tl.static_range(W - 1):
        row = rows[i].to(tl.float32)
        d_y = d_ys[i].to(tl.float32)
        _d_z, _of_taps, still = _backward_row(row, d_y, positions[i], past, owed, taps, bias, W, SILU, True)
        _write_whole(d_x_ptr, RUN + i, left, channels, still, W)
        past, owed = _pushed(row, past, W), still[: W - 1]

    parts_ptr += run.to(tl.int64) * (W + HAS_BIAS) * num_channels + channels[0]
    for j in tl.static_range(W):
        tl.store(parts_ptr + (W - 1 - j) * num_channels, sums[j], mask=channels[0] < num_channels)
    if HAS_BIAS:
        tl.store(parts_ptr + W * num_channels, sums[W], mask=channels[0] < num_channels)
