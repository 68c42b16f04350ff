"""The rows of `loss_rows.py` in one Triton kernel: it reads a chunk's logits once or twice and writes them once.

One program takes one row. It walks along it with a running maximum and sum of exponentials in each lane, in tiles of
`DEPTH` × `WIDTH` logits, so that a lane rescales its sum once in `DEPTH` logits and lanes are joined once a row.
The second walk, which overwrites logits with gradients, finds the row in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flame.kernels.loss_rows import LossTerms

_DEPTH = 4
_LANES_A_WARP = 256
"""Logits of a warp's row of a tile: 16 bytes of bf16 for each thread."""
_LONG = 65_536


def triton_losses(
    logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, *, terms: LossTerms, with_gradients: bool
) -> None:
    """Write the losses of a chunk's rows, and with `with_gradients` their gradients over its logits.

    `logits_CV` is contiguous, in bf16, fp16 or fp32; `losses_C` in fp32. A label outside the vocabulary gives a NaN.
    """
    num_rows, vocabulary = logits_CV.shape
    assert logits_CV.is_contiguous() and losses_C.is_contiguous() and labels_C.stride(0) == 1
    if num_rows == 0:
        return
    # Fewer and wider programs for long rows: what all of them hold should stay in the L2 cache between the two walks.
    num_warps = 32 if vocabulary > _LONG else 16
    width = min(_LANES_A_WARP * num_warps, triton.next_power_of_2(vocabulary))
    _loss_rows[(num_rows,)](
        logits_CV,
        labels_C,
        losses_C,
        vocabulary,
        terms.ignore_index,
        terms.softcap,
        terms.z_loss,
        terms.label_smoothing,
        HAS_SOFTCAP=terms.softcap != 0,
        HAS_SMOOTHING=terms.label_smoothing != 0,
        WITH_GRADIENTS=with_gradients,
        DEPTH=_DEPTH,
        WIDTH=width,
        num_warps=num_warps,
    )


@triton.jit
def _capped(x, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return x


@triton.jit
def _loss_rows(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    losses_ptr,
    vocabulary,
    ignore_index,
    softcap,
    z_loss,
    smoothing,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocabulary
    label = tl.load(labels_ptr + row).to(tl.int32)
    tile = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]

    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENTS:
            zeros = tl.zeros((DEPTH, WIDTH), dtype=logits_ptr.dtype.element_ty)
            for start in range(0, vocabulary, DEPTH * WIDTH):
                tl.store(row_ptr + start + tile, zeros, mask=start + tile < vocabulary)
        return

    known = (label >= 0) & (label < vocabulary)
    target = _capped(tl.load(row_ptr + label, mask=known, other=float("nan")).to(tl.float32), softcap, HAS_SOFTCAP)

    # In powers of two: exp2 is what the hardware has.
    largest = tl.full((WIDTH,), float("-inf"), dtype=tl.float32)
    exp_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, vocabulary, DEPTH * WIDTH):
        inside = start + tile < vocabulary
        x = tl.load(row_ptr + start + tile, mask=inside, other=float("-inf")).to(tl.float32)
        x = _capped(x, softcap, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            total += tl.sum(tl.where(inside, x, 0.0), axis=0)
        if HAS_SOFTCAP:
            x = tl.where(inside, x, float("-inf"))
        x *= LOG2_E
        new_largest = tl.maximum(largest, tl.max(x, axis=0))
        # a lane that has seen nothing yet has −inf on both sides
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        exp_sum = exp_sum * tl.exp2(largest - base) + tl.sum(tl.exp2(x - base[None, :]), axis=0)
        largest = new_largest
    row_largest = tl.max(largest, axis=0)
    row_sum = tl.sum(exp_sum * tl.exp2(largest - row_largest), axis=0)
    lse_2 = row_largest + tl.log2(row_sum)
    lse = lse_2 * LN_2
    loss = lse - (1 - smoothing) * target + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss -= smoothing / vocabulary * tl.sum(total, axis=0)
    tl.store(losses_ptr + row, loss)

    if WITH_GRADIENTS:
        scale = 1 + 2 * z_loss * lse
        for start in range(0, vocabulary, DEPTH * WIDTH):
            inside = start + tile < vocabulary
            x = tl.load(row_ptr + start + tile, mask=inside, other=0.0).to(tl.float32)
            x = _capped(x, softcap, HAS_SOFTCAP)
            gradient = tl.exp2(x * LOG2_E - lse_2) * scale
            if HAS_SMOOTHING:
                gradient -= smoothing / vocabulary
            gradient = tl.where(start + tile == label, gradient - (1 - smoothing), gradient)
            if HAS_SOFTCAP:
                gradient *= 1 - (x / softcap) * (x / softcap)
            tl.store(row_ptr + start + tile, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
