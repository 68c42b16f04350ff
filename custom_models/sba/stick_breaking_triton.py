"""Stick-breaking attention in Triton, forward and backward, in memory that grows with the length and not its square.

Forward: a program has a block of queries of one document and goes over blocks of keys from the nearest to the farthest;
`left` is each query's logarithm of what is left of its stick.

Backward: with D_ij = A_ij (do_j · v_i), the gradient of log A_ij, that of a score is

    dz_ij = D_ij − beta_ij · sum_{k ≤ i} D_kj

for z_ij takes from every farther key what it gives to i. A query's D sum up to do_j · o_j, so that the sum over farther
keys is that less the sum over nearer ones, and the queries' pass, again from the nearest key on, needs one sweep. It
leaves `left` and the sum so far at each block of keys for the keys' pass, `2 · H · T · max_seqlen / BLOCK` numbers, so
that dk and dv are sums in a fixed order: there are no atomics, and a step repeats itself to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


@triton.jit
def _rows(pointer, at, rows, length, stride, dims, D: tl.constexpr):
    """Load rows of one head, zeros beyond the document and beyond the head's width."""
    inside = (rows[:, None] < length) & (dims[None, :] < D)
    return tl.load(pointer + at + rows[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(pointer, at, rows, length, stride, dims, values, D: tl.constexpr):
    """Store rows of one head, as far as the document and the head's width go."""
    inside = (rows[:, None] < length) & (dims[None, :] < D)
    places = pointer + at + rows[:, None] * stride + dims[None, :]
    tl.store(places, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _scores(q, k, rows, cols, length, scale):
    """Return beta's logarithm, that of 1 − beta (0 where there is no key), and where there is a key."""
    z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    log_beta = tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))
    valid = (cols[None, :] < rows[:, None]) & (rows[:, None] < length)
    return log_beta, tl.where(valid, log_beta - z, 0.0), valid


@triton.jit
def _weights(log_beta, log_rest, valid, left):
    """Return A of a block: beta times what is left after nearer keys, of this block and of those before it."""
    nearer = tl.cumsum(log_rest, axis=1, reverse=True) - log_rest
    return tl.where(valid, tl.exp(log_beta + nearer + left[:, None]), 0.0)


@triton.jit
def _score_gradients(weights, d_block, v_block, log_beta, valid, rest):
    """Return D and dz of a block; `rest` is each query's sum of D over this block and farther ones."""
    d_log = weights * tl.dot(d_block, tl.trans(v_block), input_precision="ieee")
    farther = rest[:, None] - (tl.cumsum(d_log, axis=1, reverse=True) - d_log)
    return d_log, tl.where(valid, d_log - tl.exp(log_beta) * farther, 0.0)


@triton.jit
def _forward(q, k, v, out, cu_seqlens, scale, H, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    block, document, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + document).to(tl.int64)
    length = (tl.load(cu_seqlens + document + 1) - start).to(tl.int32)
    if block * SIZE < length:
        stride, at = H * D, (start * H + head) * D
        within, dims = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        rows = block * SIZE + within
        q_block = _rows(q, at, rows, length, stride, dims, D)
        left = tl.zeros([SIZE], tl.float32)
        sums = tl.zeros([SIZE, WIDTH], tl.float32)
        for step in range(block + 1):
            cols = (block - step) * SIZE + within
            k_block = _rows(k, at, cols, length, stride, dims, D)
            v_block = _rows(v, at, cols, length, stride, dims, D)
            log_beta, log_rest, valid = _scores(q_block, k_block, rows, cols, length, scale)
            weights = _weights(log_beta, log_rest, valid, left)
            sums += tl.dot(weights.to(v_block.dtype), v_block, input_precision="ieee")
            left += tl.sum(log_rest, axis=1)
        _store_rows(out, at, rows, length, stride, dims, sums, D)


@triton.jit
def _backward_queries(
    q, k, v, d_out, totals, dq, kept_left, kept_sums, cu_seqlens, scale, T, H, BLOCKS,
    D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block, document, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + document).to(tl.int64)
    length = (tl.load(cu_seqlens + document + 1) - start).to(tl.int32)
    if block * SIZE < length:
        stride, at = H * D, (start * H + head) * D
        within, dims = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        rows = block * SIZE + within
        q_block = _rows(q, at, rows, length, stride, dims, D)
        d_block = _rows(d_out, at, rows, length, stride, dims, D)
        total = tl.load(totals + (start + rows) * H + head, mask=rows < length, other=0.0)
        kept = (head.to(tl.int64) * T + start + rows) * BLOCKS
        left = tl.zeros([SIZE], tl.float32)
        nearer_sum = tl.zeros([SIZE], tl.float32)
        sums = tl.zeros([SIZE, WIDTH], tl.float32)
        for step in range(block + 1):
            keys = block - step
            cols = keys * SIZE + within
            tl.store(kept_left + kept + keys, left, mask=rows < length)
            tl.store(kept_sums + kept + keys, nearer_sum, mask=rows < length)
            k_block = _rows(k, at, cols, length, stride, dims, D)
            v_block = _rows(v, at, cols, length, stride, dims, D)
            log_beta, log_rest, valid = _scores(q_block, k_block, rows, cols, length, scale)
            weights = _weights(log_beta, log_rest, valid, left)
            d_log, dz = _score_gradients(weights, d_block, v_block, log_beta, valid, total - nearer_sum)
            sums += tl.dot(dz.to(k_block.dtype), k_block, input_precision="ieee")
            left += tl.sum(log_rest, axis=1)
            nearer_sum += tl.sum(d_log, axis=1)
        _store_rows(dq, at, rows, length, stride, dims, sums * scale, D)


@triton.jit
def _backward_keys(
    q, k, v, d_out, totals, dk, dv, kept_left, kept_sums, cu_seqlens, scale, T, H, BLOCKS,
    D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    keys, document, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + document).to(tl.int64)
    length = (tl.load(cu_seqlens + document + 1) - start).to(tl.int32)
    if keys * SIZE < length:
        stride, at = H * D, (start * H + head) * D
        within, dims = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        cols = keys * SIZE + within
        k_block = _rows(k, at, cols, length, stride, dims, D)
        v_block = _rows(v, at, cols, length, stride, dims, D)
        k_sums = tl.zeros([SIZE, WIDTH], tl.float32)
        v_sums = tl.zeros([SIZE, WIDTH], tl.float32)
        for block in range(keys, tl.cdiv(length, SIZE)):
            rows = block * SIZE + within
            q_block = _rows(q, at, rows, length, stride, dims, D)
            d_block = _rows(d_out, at, rows, length, stride, dims, D)
            total = tl.load(totals + (start + rows) * H + head, mask=rows < length, other=0.0)
            kept = (head.to(tl.int64) * T + start + rows) * BLOCKS + keys
            left = tl.load(kept_left + kept, mask=rows < length, other=0.0)
            nearer_sum = tl.load(kept_sums + kept, mask=rows < length, other=0.0)
            log_beta, log_rest, valid = _scores(q_block, k_block, rows, cols, length, scale)
            weights = _weights(log_beta, log_rest, valid, left)
            _, dz = _score_gradients(weights, d_block, v_block, log_beta, valid, total - nearer_sum)
            k_sums += tl.dot(tl.trans(dz).to(q_block.dtype), q_block, input_precision="ieee")
            v_sums += tl.dot(tl.trans(weights).to(d_block.dtype), d_block, input_precision="ieee")
        _store_rows(dk, at, cols, length, stride, dims, k_sums * scale, D)
        _store_rows(dv, at, cols, length, stride, dims, v_sums, D)


class _StickBreaking(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, block: int
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        _, num_heads, dim = q.shape
        out = torch.empty_like(v)
        sizes = {"D": dim, "WIDTH": max(16, triton.next_power_of_2(dim)), "SIZE": block}
        grid = (triton.cdiv(max_seqlen, block), len(cu_seqlens) - 1, num_heads)
        _forward[grid](q, k, v, out, cu_seqlens, scale, num_heads, **sizes)
        context.save_for_backward(q, k, v, out, cu_seqlens)
        context.scale, context.grid, context.sizes = scale, grid, sizes
        return out

    @staticmethod
    def backward(context: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, cu_seqlens = context.saved_tensors
        num_tokens, num_heads, _ = q.shape
        blocks = context.grid[0]
        d_out = d_out.contiguous()
        totals = (d_out.float() * out.float()).sum(-1)
        left = torch.empty(num_heads, num_tokens, blocks, dtype=torch.float32, device=q.device)
        sums = torch.empty_like(left)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        shape = (cu_seqlens, context.scale, num_tokens, num_heads, blocks)
        _backward_queries[context.grid](q, k, v, d_out, totals, dq, left, sums, *shape, **context.sizes)
        _backward_keys[context.grid](q, k, v, d_out, totals, dk, dv, left, sums, *shape, **context.sizes)
        return dq, dk, dv, None, None, None, None


def triton_stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, *, block: int = BLOCK
) -> Tensor:
    """Return what `torch_stick_breaking` does, of `[T, H, D]` each; a document must not exceed `max_seqlen`."""
    found: Tensor = _StickBreaking.apply(q, k, v, cu_seqlens, max_seqlen, scale, block)
    return found
