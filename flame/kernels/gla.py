"""Gated linear attention from fla's kernels, with fewer bytes moved in backward than fla's own function moves.

S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ, o_t = Sᵀ_t q_t · scale, a chunk of tokens at a time. Source: Yang et al. 2024,
"Gated Linear Attention Transformers", section 4.

fla's function computes the states before each chunk again in backward, writes them and their gradients in fp32, and
turns gradients of queries, keys and gates from fp32 in passes of their own. Here the states of forward are kept, in the
dtype of the keys, their gradients have that dtype too, and the last kernel writes its results in the dtypes that are
asked for. The result and the gradients of q, k and v have the same bits: fla's kernels round states before a product.
The gradient of g takes products of both states, which there are in fp32 and here rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_kernel_h
from fla.ops.gla import chunk as fla_gla
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.index import prepare_chunk_offsets
from torch import Tensor

from flame.kernels.chunks import most_chunks, packed_arguments


class GatedLinearAttention:
    """Forward and backward as a `torch.autograd.Function` has them; `ctx` is autograd's, or what stands for it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor]:
        packed = packed_arguments(cu_seqlens, chunk_size)
        g_sum = chunk_local_cumsum(g, scale=RCP_LN2, **packed)
        states = _states(k, v, g_sum, cu_seqlens, chunk_size)
        scores = fla_gla.chunk_gla_fwd_intra_gk(q=q, k=k, g=g_sum, scale=scale, **packed)
        o = fla_gla.chunk_gla_fwd_o_gk(q=q, v=v, g=g_sum, A=scores, h=states, scale=scale, state_v_first=True, **packed)
        ctx.save_for_backward(q, k, v, g, states, scores)
        ctx.cu_seqlens, ctx.chunk_size, ctx.scale = cu_seqlens, chunk_size, scale
        return (o,)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, _: None = None) -> tuple[Tensor | None, ...]:
        q, k, v, g, states, scores = ctx.saved_tensors
        scale, chunk_size = ctx.scale, ctx.chunk_size
        packed = packed_arguments(ctx.cu_seqlens, chunk_size)
        g_sum = chunk_local_cumsum(g, scale=RCP_LN2, **packed)
        d_states, _ = chunk_bwd_dh(
            q=q,
            k=k,
            v=v,
            gk=g_sum,
            do=d_o,
            h0=None,
            dht=None,
            scale=scale,
            state_v_first=True,
            cu_seqlens=ctx.cu_seqlens,
            chunk_size=chunk_size,
        )
        d_v = fla_gla.chunk_gla_bwd_dv(k=k, g=g_sum, A=scores, do=d_o, dh=d_states, state_v_first=True, **packed)
        d_scores = fla_gla.chunk_gla_bwd_dA(v=v, do=d_o, scale=scale, **packed)
        within = fla_gla.chunk_gla_bwd_dqk_intra(q=q, k=k, g=g_sum, dA=d_scores, **packed)
        d_q, d_k, d_g = _d_qkg(q, k, v, g, g_sum, states, d_o, d_states, within, scale, packed)
        return d_q, d_k, d_v, d_g, None, None, None


def _states(k: Tensor, v: Tensor, g_sum: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
    """Return the state before each chunk, `[B, chunks, H, V, K]`; of packed documents the last ones may be unused."""
    B, T, H, K = k.shape
    V = v.shape[-1]
    states = k.new_empty(B, most_chunks(T, chunk_size, cu_seqlens), H, V, K)
    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    chunk_fwd_kernel_h[lambda meta: (triton.cdiv(K, meta["BK"]) * triton.cdiv(V, meta["BV"]) * sequences * H,)](
        k=k,
        v=v,
        h=states,
        g=None,
        g_gamma=None,
        gk=g_sum,
        gv=None,
        h0=None,
        ht=None,
        cu_seqlens=cu_seqlens,
        split_offsets=None if cu_seqlens is None else prepare_chunk_offsets(cu_seqlens, chunk_size),
        T=T,
        H=H,
        K=K,
        V=V,
        BT=chunk_size,
        BS=chunk_size,
        USE_G=False,
        USE_G_GAMMA=False,
        USE_GK=True,
        USE_GV=False,
        STATE_V_FIRST=True,
    )
    return states


def _d_qkg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_sum: Tensor,
    states: Tensor,
    d_o: Tensor,
    d_states: Tensor,
    within: tuple[Tensor, Tensor],
    scale: float,
    packed: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and gates; `within` are those of q and k from their own chunks, in fp32."""
    B, T, H, K = q.shape
    chunk_size, indices = packed["chunk_size"], packed["chunk_indices"]
    chunks = triton.cdiv(T, chunk_size) if indices is None else len(indices)
    d_q, d_k, d_g = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)
    fla_gla.chunk_gla_bwd_kernel_inter[lambda meta: (triton.cdiv(K, meta["BK"]) * chunks, B * H)](
        q=q,
        k=k,
        v=v,
        g=g_sum,
        h=states,
        do=d_o,
        dh=d_states,
        dq=within[0],
        dk=within[1],
        dq2=d_q,
        dk2=d_k,
        dg=d_g,
        cu_seqlens=packed["cu_seqlens"],
        chunk_indices=indices,
        scale=scale,
        T=T,
        H=H,
        K=K,
        V=v.shape[-1],
        BT=chunk_size,
        STATE_V_FIRST=True,
    )
    return d_q, d_k, d_g
