"""The gated delta rule, a chunk of tokens at a time: fla's kernels within a chunk, our own along a document.

S_t = exp g_t · S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t · scale, with S as V × K. Source: Yang et al.
2025, "Gated Delta Networks", equation 10 and section 3.3.

Of fla's kernels those take longest that carry a state from chunk to chunk, and write it for a kernel of the outputs to
read, and that of a chunk's gradients. Here the walk of forward makes the outputs as it goes and writes no state; walks
keep the state where the matrix units read it; and a chunk's gradients are summed up over fewer values at once, so that
they stay in registers (`gated_delta_rule_triton.py`). Where our walks do not suit (`walks_suit`), fla's run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.common.gate import fused_beta_sigmoid, fused_beta_sigmoid_bwd
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.gate import gdn_gate_bwd, gdn_gate_chunk_cumsum
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.index import prepare_chunk_offsets
from fla.utils import tensor_cache
from torch import Tensor

from flame.kernels import gated_delta_rule_triton as kernels
from flame.kernels.chunks import packed_arguments
from flame.kernels.dispatch import walks_refusal


class GatedDeltaRule:
    """Forward and backward as a `torch.autograd.Function` has them; `ctx` is autograd's, or what stands for it.

    Queries and keys are given the length 1, β is the sigmoid of `beta` (twice that with `allow_neg_eigval`), and the
    logarithm of a token's decay is −exp(A_log) · softplus(g + dt_bias).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        allow_neg_eigval: bool,
        chunk_size: int,
    ) -> tuple[Tensor]:
        q, q_factor = l2norm_fwd(q)
        k, k_factor = l2norm_fwd(k)
        beta_used = fused_beta_sigmoid(beta, scale=2.0 if allow_neg_eigval else 1.0)
        packed = packed_arguments(cu_seqlens, chunk_size)
        g_sum = gdn_gate_chunk_cumsum(g=g, A_log=A_log, dt_bias=dt_bias, scale=RCP_LN2, **packed)
        w, u, scores = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g_sum, beta=beta_used, **packed)
        o = outputs(q, k, w, u, g_sum, scale, packed)
        ctx.save_for_backward(q, q_factor, k, k_factor, v, g_sum, beta, beta_used, scores, g, A_log, dt_bias)
        ctx.cu_seqlens, ctx.chunk_size, ctx.scale = cu_seqlens, chunk_size, scale
        ctx.allow_neg_eigval = allow_neg_eigval
        return (o,)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, _: None = None) -> tuple[Tensor | None, ...]:
        q, q_factor, k, k_factor, v, g_sum, beta, beta_used, scores, g, A_log, dt_bias = ctx.saved_tensors
        packed = packed_arguments(ctx.cu_seqlens, ctx.chunk_size)
        offsets = {name: packed[name] for name in ("cu_seqlens", "chunk_indices")}
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta_used, A=scores, g=g_sum, **offsets)
        states, v_new = states_before(k, w, u, g_sum, packed)
        del u
        d_states, d_u = state_gradients(q, k, w, g_sum, d_o, ctx.scale, packed)
        d_q, d_k, d_w, d_g = chunk_gradients(q, k, g_sum, v_new, d_o, states, d_states, ctx.scale, packed, d_v=d_u)
        del states, d_states, v_new, w
        d_k_within, d_v, d_beta, d_g_within = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta_used, g=g_sum, A=scores, dw=d_w, du=d_u, **offsets
        )
        d_g = chunk_local_cumsum(d_g.add_(d_g_within), reverse=True, **packed)
        d_g, d_A_log, d_dt_bias = gdn_gate_bwd(g=g, A_log=A_log, dt_bias=dt_bias, dyg=d_g)
        d_q, d_k = l2norm_bwd(q, q_factor, d_q), l2norm_bwd(k, k_factor, d_k.add_(d_k_within))
        d_beta = fused_beta_sigmoid_bwd(beta, d_beta, scale=2.0 if ctx.allow_neg_eigval else 1.0)
        return d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, None, None, None, None


@cache  # asked in each layer
def _walks_suit(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    return walks_refusal(device=device, dtype=dtype, key_dim=key_dim, value_dim=value_dim) is None


def walks_suit(k_BTHK: Tensor, v_BTHV: Tensor) -> bool:
    """Tell whether our walks run for these, by `flame.kernels.dispatch.walks_refusal`; else fla's kernels do."""
    return _walks_suit(k_BTHK.device, k_BTHK.dtype, k_BTHK.shape[-1], v_BTHV.shape[-1])


def outputs(q: Tensor, k: Tensor, w: Tensor, u: Tensor, g_sum: Tensor, scale: float, packed: dict[str, Any]) -> Tensor:
    """Return the outputs `[B, T, HV, V]`, with `w` `[B, T, HV, K]` and `u` `[B, T, HV, V]` of fla's kernels."""
    if not walks_suit(k, u):
        states, v_new = states_before(k, w, u, g_sum, packed)
        return chunk_fwd_o(q=q, k=k, v=v_new, h=states, g=g_sum, scale=scale, state_v_first=True, **packed)
    o = torch.empty_like(u)
    _walk(kernels.walk_forward, k, u, packed, q=q, u=u, w=w, g=g_sum, o=o, v_new=None, states=None, scale=scale)
    return o


def states_before(k: Tensor, w: Tensor, u: Tensor, g_sum: Tensor, packed: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, `[B, chunks, HV, V, K]`, and the values that tokens add, `[B, T, HV, V]`."""
    if not walks_suit(k, u):
        states, v_new, _ = chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=g_sum, state_v_first=True, **packed)
        return states, v_new
    states, v_new = _empty_states(k, u, packed), torch.empty_like(u)
    _walk(kernels.walk_forward, k, u, packed, q=None, u=u, w=w, g=g_sum, o=None, v_new=v_new, states=states, scale=1.0)
    return states, v_new


def state_gradients(
    q: Tensor, k: Tensor, w: Tensor, g_sum: Tensor, d_o: Tensor, scale: float, packed: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the state after each chunk and of the values that tokens add, by the shapes of those."""
    if not walks_suit(k, d_o):
        d_v = chunk_bwd_dv_local(q=q, k=k, g=g_sum, do=d_o, scale=scale, **packed)
        d_states, _, d_v = chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=w, g=g_sum, do=d_o, dv=d_v, scale=scale, state_v_first=True, **packed
        )
        return d_states, d_v
    d_states, d_v = _empty_states(k, d_o, packed), torch.empty_like(d_o)
    _walk(kernels.walk_backward, k, d_o, packed, q=q, w=w, g=g_sum, do=d_o, dv=d_v, d_states=d_states, scale=scale)
    return d_states, d_v


def chunk_gradients(
    q: Tensor,
    k: Tensor,
    g_sum: Tensor,
    v_new: Tensor,
    d_o: Tensor,
    states: Tensor,
    d_states: Tensor,
    scale: float,
    packed: dict[str, Any],
    *,
    d_v: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of q and k `[B, T, H, K]`, of w `[B, T, HV, K]`, and of g before it is summed, in fp32.

    That of w is of the gradients `d_v` of the values that tokens add, and None without them. Both states are V × K.
    """
    (B, T, H, K), HV = k.shape, v_new.shape[2]
    d_q, d_k = (k.new_empty(B, T, HV, K) for _ in range(2))
    d_w = None if d_v is None else torch.empty_like(d_q)
    columns = triton.cdiv(K, kernels.columns_of_keys(K))
    d_g = g_sum.new_empty(columns, B, T, HV)
    kernels.chunk_gradients[(columns * _num_chunks(T, packed), B * HV)](
        q=q,
        k=k,
        g=g_sum,
        v_new=v_new,
        do=d_o,
        dv=d_v,
        states=states,
        d_states=d_states,
        dq=d_q,
        dk=d_k,
        dw=d_w,
        dg=d_g,
        cu_seqlens=packed["cu_seqlens"],
        chunk_indices=packed["chunk_indices"],
        scale=scale,
        T=T,
        all_tokens=B * T,
        **_sizes(k, v_new, packed),
    )
    if H != HV:
        d_q, d_k = (x.view(B, T, H, HV // H, K).sum(3) for x in (d_q, d_k))
    return d_q, d_k, d_w, d_g.sum(0)


def _num_chunks(T: int, packed: dict[str, Any]) -> int:
    """Return how many chunks a row has."""
    indices = packed["chunk_indices"]
    return int(triton.cdiv(T, packed["chunk_size"]) if indices is None else len(indices))


def _empty_states(k: Tensor, v: Tensor, packed: dict[str, Any]) -> Tensor:
    """Return room for a state a chunk."""
    (B, T, _, K), (_, _, HV, V) = k.shape, v.shape
    return k.new_empty(B, _num_chunks(T, packed), HV, V, K)


def _sizes(k: Tensor, v: Tensor, packed: dict[str, Any]) -> dict[str, Any]:
    """Return what our kernels are compiled for."""
    (_, _, H, K), (_, _, HV, V) = k.shape, v.shape
    heads = {"H": H, "HV": HV, "K": K, "V": V}
    chunk, is_packed = packed["chunk_size"], packed["cu_seqlens"] is not None
    return {**heads, "BT": chunk, "BK": kernels.columns_of_keys(K), "IS_PACKED": is_packed}


def _walk(kernel: Any, k: Tensor, v: Tensor, packed: dict[str, Any], **arguments: Any) -> None:
    """Launch a walk along every document, for every head and some values of each."""
    cu_seqlens, chunk_size = packed["cu_seqlens"], packed["chunk_size"]
    sequences = len(k) if cu_seqlens is None else len(cu_seqlens) - 1
    sizes = _sizes(k, v, packed)
    if v.device.type == "cuda":
        triton.set_allocator(_scratch)  # for descriptors that programs make; each thread has its own
    kernel[lambda meta: (triton.cdiv(sizes["V"], meta["BV"]) * sequences * sizes["HV"],)](
        k=k,
        **arguments,
        cu_seqlens=cu_seqlens,
        chunk_offsets=None if cu_seqlens is None else prepare_chunk_offsets(cu_seqlens, chunk_size),
        longest_first=None if cu_seqlens is None else longest_first(cu_seqlens),
        T=k.shape[1],
        **sizes,
    )


@tensor_cache
def longest_first(cu_seqlens: Tensor) -> Tensor:
    """Return the numbers of packed documents, those of the longest ones first; made once for the same offsets.

    Programs that walk along documents begin in that order, so that none is left alone with a long one at the end.
    Nothing waits for the device.
    """
    return cu_seqlens.diff().argsort(descending=True)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
