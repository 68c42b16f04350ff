"""Linear attention with a decay a head, which is a state of mamba2, from fla's kernels and one of our own.

S_t = exp g_t · S_{t−1} + v_t k_tᵀ, o_t = S_t q_t · scale, with S as V × K, a chunk of tokens at a time. Source: Dao
and Gu 2024, "Transformers are SSMs", section 6.

fla's kernel of a chunk's gradients reads memory that is not its own on an H200 with Triton 3.6 (128 keys, 64 values),
and fla refuses it on Hopper. In its place is that of the gated delta rule, which reads states in the dtype of the keys
where fla's are fp32.
"""

from __future__ import annotations

from typing import Any

from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dv, chunk_fwd_o
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from flame.kernels.chunks import packed_arguments
from flame.kernels.gated_delta_rule import chunk_gradients


class SimpleGatedLinearAttention:
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
        o = chunk_fwd_o(q=q, k=k, v=v, h=states, g=g_sum, scale=scale, state_v_first=True, **packed)
        ctx.save_for_backward(q, k, v, g_sum)
        ctx.cu_seqlens, ctx.chunk_size, ctx.scale = cu_seqlens, chunk_size, scale
        return (o,)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, _: None = None) -> tuple[Tensor | None, ...]:
        q, k, v, g_sum = ctx.saved_tensors
        packed = packed_arguments(ctx.cu_seqlens, ctx.chunk_size)
        states = _states(k, v, g_sum, ctx.cu_seqlens, ctx.chunk_size)
        d_states, _ = chunk_bwd_dh(
            q=q,
            k=k,
            v=v,
            g=g_sum,
            do=d_o,
            h0=None,
            dht=None,
            scale=ctx.scale,
            state_v_first=True,
            cu_seqlens=ctx.cu_seqlens,
            chunk_size=ctx.chunk_size,
        )
        d_q, d_k, _d_w, d_g = chunk_gradients(q, k, g_sum, v, d_o, states, d_states, ctx.scale, packed)
        d_v = chunk_bwd_dv(q=q, k=k, g=g_sum, do=d_o, dh=d_states, scale=ctx.scale, state_v_first=True, **packed)
        return d_q, d_k, d_v, chunk_local_cumsum(d_g, reverse=True, **packed), None, None, None


def _states(k: Tensor, v: Tensor, g_sum: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
    """Return the state before each chunk, `[B, chunks, H, V, K]`."""
    states: Tensor
    states, _ = chunk_fwd_h(
        k=k, v=v, g=g_sum, output_final_state=False, state_v_first=True, cu_seqlens=cu_seqlens, chunk_size=chunk_size
    )
    return states
