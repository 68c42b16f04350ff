"""The Triton kernels of `flame/kernels/gated_delta_rule.py`: two walks along documents, and the gradients of a chunk.

A program keeps some rows of a state, which is V × K, in registers, so that it is the left operand of every product that
it takes part in: Hopper's matrix units read that one from registers, and a state never passes through shared memory
between a chunk's products. Tokens past a document's end are read as zeros and not written.

Gates `g` are sums within the chunk, in powers of two, in fp32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flame.kernels.dispatch import WALKED_KEYS


def columns_of_keys(K: int) -> int:
    """Return how many columns of the keys a tile has."""
    return min(WALKED_KEYS, max(16, triton.next_power_of_2(K)))


def _fitting(configs: list[Any], positional: dict[str, Any], **named: Any) -> list[Any]:
    """Leave those whose tiles divide the values: a head's states lie beside the next one's."""
    return [config for config in configs if (positional | named)["V"] % config.kwargs["BV"] == 0]


def _tuned(*choices: dict[str, Any], **options: Any) -> Any:
    """Tune a kernel over choices of its tiles, and of warps and stages."""

    def config(num_warps: int, num_stages: int, **tiles: Any) -> Any:
        return triton.Config(tiles, num_warps=num_warps, num_stages=num_stages)

    key = ["H", "HV", "K", "V", "BT", "IS_PACKED"]
    return triton.autotune(configs=[config(**choice) for choice in choices], key=key, **options)


@triton.jit
def _document(i_n, cu_seqlens, chunk_offsets, longest_first, T, BT: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the i-th longest sequence's start, length and number of chunks, and the place of its first chunk."""
    if IS_PACKED:
        i_n = tl.load(longest_first + i_n)
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
        first_chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        first = i_n.to(tl.int64) * T
        length = T
        first_chunk = i_n.to(tl.int64) * tl.cdiv(T, BT)
    return first, length, tl.cdiv(length, BT), first_chunk


@_tuned(
    {"BV": 64, "BY_ROWS": False, "num_warps": 4, "num_stages": 1},
    {"BV": 64, "BY_ROWS": False, "num_warps": 4, "num_stages": 2},
    {"BV": 64, "BY_ROWS": True, "num_warps": 4, "num_stages": 2},
    {"BV": 128, "BY_ROWS": False, "num_warps": 8, "num_stages": 1},
    {"BV": 128, "BY_ROWS": False, "num_warps": 8, "num_stages": 2},
    {"BV": 128, "BY_ROWS": True, "num_warps": 8, "num_stages": 2},
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.heuristics({"WITH_OUTPUT": lambda given: given["o"] is not None})
@triton.jit(do_not_specialize=["T"])
def walk_forward(
    q,
    k,
    u,
    w,
    g,
    o,
    v_new,
    states,
    cu_seqlens,
    chunk_offsets,
    longest_first,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BY_ROWS: tl.constexpr,
    WITH_OUTPUT: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Write the outputs; or, for backward, the state before each chunk and the values less what it holds of them."""
    pid = tl.program_id(0)
    num_v: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % num_v, pid // num_v
    i_n, i_h = i_nh // HV, i_nh % HV
    first, length, chunks, first_chunk = _document(i_n, cu_seqlens, chunk_offsets, longest_first, T, BT, IS_PACKED)
    i_hk = i_h // (HV // H)
    # rows past the document's end are read as zeros, and not written
    k_rows = tl.make_tensor_descriptor(k + (first * H + i_hk) * K, [length, K], [H * K, 1], [BT, BK])
    w_rows = tl.make_tensor_descriptor(w + (first * HV + i_h) * K, [length, K], [HV * K, 1], [BT, BK])
    u_rows = tl.make_tensor_descriptor(u + (first * HV + i_h) * V, [length, V], [HV * V, 1], [BT, BV])
    if WITH_OUTPUT:
        q_rows = tl.make_tensor_descriptor(q + (first * H + i_hk) * K, [length, K], [H * K, 1], [BT, BK])
        o_rows = tl.make_tensor_descriptor(o + (first * HV + i_h) * V, [length, V], [HV * V, 1], [BT, BV])
    else:
        v_rows = tl.make_tensor_descriptor(v_new + (first * HV + i_h) * V, [length, V], [HV * V, 1], [BT, BV])
        # the states of a head are rows HV * V apart
        s_rows = tl.make_tensor_descriptor(
            states + first_chunk * HV * V * K, [chunks, HV * V, K], [HV * V * K, K, 1], [1, BV, BK]
        )
    row = i_h * V + i_v * BV
    g += first * HV + i_h
    u += (first * HV + i_h) * V + i_v * BV

    o_t = tl.arange(0, BT)
    b_s = tl.zeros([BV, BK], dtype=tl.float32)
    if K > BK:
        b_s2 = tl.zeros([BV, BK], dtype=tl.float32)
    for i_t in range(chunks):
        t = i_t * BT
        m_t = t + o_t < length
        b_g = tl.load(g + (t + o_t) * HV, mask=m_t, other=0.0)
        b_g_last = tl.load(g + (tl.minimum(t + BT, length) - 1) * HV)
        b_k = k_rows.load([t, 0])
        if K > BK:
            b_k2 = k_rows.load([t, BK])
        if WITH_OUTPUT:
            b_q = q_rows.load([t, 0])
            # scores of keys s (rows) for queries t (columns)
            b_p = tl.dot(b_k, tl.trans(b_q))
            if K > BK:
                b_q2 = q_rows.load([t, BK])
                b_p = tl.dot(b_k2, tl.trans(b_q2), b_p)
            seen = (o_t[:, None] <= o_t[None, :]) & m_t[None, :]
            b_seen = tl.where(seen, b_p * tl.exp2(b_g[None, :] - b_g[:, None]), 0.0).to(b_k.dtype)
        if BY_ROWS:
            # not by the descriptor: rows would be in shared memory twice, which then lacks room for two stages
            p_u = o_t[:, None] * (HV * V) + tl.arange(0, BV)[None, :]
            b_u = tl.load(u + tl.cast(i_t, tl.int64) * (BT * HV * V) + p_u, mask=m_t[:, None], other=0.0)
        # products of [BV, BK] and [BK, BT]
        b_held = b_s.to(b_k.dtype)
        b_v = tl.dot(b_held, tl.trans(w_rows.load([t, 0])))
        if WITH_OUTPUT:
            b_o = tl.dot(b_held, tl.trans(b_q))
        else:
            s_rows.store([i_t, row, 0], b_held[None, :, :])
        if K > BK:
            b_held = b_s2.to(b_k.dtype)
            b_v = tl.dot(b_held, tl.trans(w_rows.load([t, BK])), b_v)
            if WITH_OUTPUT:
                b_o = tl.dot(b_held, tl.trans(b_q2), b_o)
            else:
                s_rows.store([i_t, row, BK], b_held[None, :, :])
        if not BY_ROWS:
            b_u = u_rows.load([t, i_v * BV])
        b_v = tl.trans(b_u).to(tl.float32) - b_v
        if WITH_OUTPUT:
            b_o *= tl.exp2(b_g)[None, :]
            b_o = tl.dot(b_v.to(b_k.dtype), b_seen, b_o) * scale
            o_rows.store([t, i_v * BV], tl.trans(b_o.to(b_k.dtype)))
        else:
            v_rows.store([t, i_v * BV], tl.trans(b_v.to(b_k.dtype)))
        b_added = (b_v * tl.where(m_t, tl.exp2(b_g_last - b_g), 0.0)[None, :]).to(b_k.dtype)
        # products of [BV, BT] and [BT, BK]
        b_s = tl.dot(b_added, b_k, b_s * tl.exp2(b_g_last))
        if K > BK:
            b_s2 = tl.dot(b_added, b_k2, b_s2 * tl.exp2(b_g_last))


@_tuned(
    {"BV": 64, "BY_ROWS": False, "num_warps": 4, "num_stages": 1},
    {"BV": 64, "BY_ROWS": False, "num_warps": 4, "num_stages": 2},
    {"BV": 64, "BY_ROWS": True, "num_warps": 4, "num_stages": 2},
    {"BV": 128, "BY_ROWS": False, "num_warps": 8, "num_stages": 1},
    {"BV": 128, "BY_ROWS": True, "num_warps": 8, "num_stages": 2},
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["T"])
def walk_backward(
    q,
    k,
    w,
    g,
    do,
    dv,
    d_states,
    cu_seqlens,
    chunk_offsets,
    longest_first,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BY_ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Write the gradients of the state after each chunk, and of the values that chunks add to it."""
    pid = tl.program_id(0)
    num_v: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % num_v, pid // num_v
    i_n, i_h = i_nh // HV, i_nh % HV
    first, length, chunks, first_chunk = _document(i_n, cu_seqlens, chunk_offsets, longest_first, T, BT, IS_PACKED)
    i_hk = i_h // (HV // H)
    q_rows = tl.make_tensor_descriptor(q + (first * H + i_hk) * K, [length, K], [H * K, 1], [BT, BK])
    k_rows = tl.make_tensor_descriptor(k + (first * H + i_hk) * K, [length, K], [H * K, 1], [BT, BK])
    w_rows = tl.make_tensor_descriptor(w + (first * HV + i_h) * K, [length, K], [HV * K, 1], [BT, BK])
    do_rows = tl.make_tensor_descriptor(do + (first * HV + i_h) * V, [length, V], [HV * V, 1], [BT, BV])
    dv_rows = tl.make_tensor_descriptor(dv + (first * HV + i_h) * V, [length, V], [HV * V, 1], [BT, BV])
    # the states of a head are rows HV * V apart
    d_rows = tl.make_tensor_descriptor(
        d_states + first_chunk * HV * V * K, [chunks, HV * V, K], [HV * V * K, K, 1], [1, BV, BK]
    )
    row = i_h * V + i_v * BV
    g += first * HV + i_h
    do += (first * HV + i_h) * V + i_v * BV
    dv += (first * HV + i_h) * V + i_v * BV

    o_t = tl.arange(0, BT)
    b_d = tl.zeros([BV, BK], dtype=tl.float32)
    if K > BK:
        b_d2 = tl.zeros([BV, BK], dtype=tl.float32)
    for i in range(chunks):
        i_t = chunks - 1 - i
        t = i_t * BT
        m_t = t + o_t < length
        b_g = tl.load(g + (t + o_t) * HV, mask=m_t, other=0.0)
        b_g_last = tl.load(g + (tl.minimum(t + BT, length) - 1) * HV)
        b_q = q_rows.load([t, 0])
        b_k = k_rows.load([t, 0])
        if K > BK:
            b_q2 = q_rows.load([t, BK])
            b_k2 = k_rows.load([t, BK])
        # scores of queries t (rows) for keys s (columns)
        b_p = tl.dot(b_q, tl.trans(b_k))
        if K > BK:
            b_p = tl.dot(b_q2, tl.trans(b_k2), b_p)
        seen = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
        b_seen = tl.where(seen, b_p * tl.exp2(b_g[:, None] - b_g[None, :]) * scale, 0.0).to(b_k.dtype)
        # products of [BV, BK] and [BK, BT]
        b_held = b_d.to(b_k.dtype)
        d_rows.store([i_t, row, 0], b_held[None, :, :])
        b_dv = tl.dot(b_held, tl.trans(b_k))
        if K > BK:
            b_held = b_d2.to(b_k.dtype)
            d_rows.store([i_t, row, BK], b_held[None, :, :])
            b_dv = tl.dot(b_held, tl.trans(b_k2), b_dv)
        b_dv *= tl.where(m_t, tl.exp2(b_g_last - b_g), 0.0)[None, :]
        if BY_ROWS:
            # as in walk_forward; and w, loaded in a branch, is not in shared memory twice either
            p_v = tl.cast(i_t, tl.int64) * (BT * HV * V) + o_t[:, None] * (HV * V) + tl.arange(0, BV)[None, :]
            b_do = tl.trans(tl.load(do + p_v, mask=m_t[:, None], other=0.0))
            b_added = tl.dot(b_do, b_seen, b_dv).to(b_k.dtype)
            tl.store(dv + p_v, tl.trans(b_added), mask=m_t[:, None])
        else:
            b_dv = tl.dot(tl.trans(do_rows.load([t, i_v * BV])), b_seen, b_dv)
            b_added = b_dv.to(b_k.dtype)
            dv_rows.store([t, i_v * BV], tl.trans(b_added))
            b_do = tl.trans(do_rows.load([t, i_v * BV]))
        b_do = (b_do.to(tl.float32) * (tl.exp2(b_g) * scale)[None, :]).to(b_k.dtype)
        # products of [BV, BT] and [BT, BK]
        b_d = tl.dot(b_do, b_q, b_d * tl.exp2(b_g_last))
        if K > BK:
            b_d2 = tl.dot(b_do, b_q2, b_d2 * tl.exp2(b_g_last))
        if BY_ROWS:
            if t < length:
                b_d = tl.dot(-b_added, w_rows.load([t, 0]), b_d)
                if K > BK:
                    b_d2 = tl.dot(-b_added, w_rows.load([t, BK]), b_d2)
        else:
            b_d = tl.dot(-b_added, w_rows.load([t, 0]), b_d)
            if K > BK:
                b_d2 = tl.dot(-b_added, w_rows.load([t, BK]), b_d2)


@_tuned(
    {"BV": 64, "num_warps": 8, "num_stages": 2},
    {"BV": 64, "num_warps": 8, "num_stages": 3},
    {"BV": 64, "num_warps": 4, "num_stages": 2},
    {"BV": 32, "num_warps": 4, "num_stages": 2},
    {"BV": 32, "num_warps": 4, "num_stages": 3},
)
@triton.heuristics({"WITH_W": lambda given: given["dw"] is not None})
@triton.jit(do_not_specialize=["T"])
def chunk_gradients(
    q,
    k,
    g,
    v_new,
    do,
    dv,
    states,
    d_states,
    dq,
    dk,
    dw,
    dg,
    cu_seqlens,
    chunk_indices,
    scale,
    T,
    all_tokens,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WITH_W: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Write a chunk's gradients of q, k, w (if there is one) and g before it is summed up, of `BK` columns each."""
    num_k: tl.constexpr = (K + BK - 1) // BK
    pid, i_bh = tl.program_id(0), tl.program_id(1)
    i_k, i_c = pid % num_k, pid // num_k
    i_b, i_h = i_bh // HV, i_bh % HV
    if IS_PACKED:
        i_n = tl.load(chunk_indices + i_c * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int32)
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
        place = i_c.to(tl.int64)
    else:
        i_t = i_c
        first = i_b.to(tl.int64) * T
        length = T
        place = i_b.to(tl.int64) * tl.cdiv(T, BT) + i_c
    i_hk = i_h // (HV // H)
    # a document may have more than 2^31 elements, a chunk has not
    left = length - i_t * BT
    first += i_t.to(tl.int64) * BT
    q += (first * H + i_hk) * K
    k += (first * H + i_hk) * K
    g += first * HV + i_h
    v_new += (first * HV + i_h) * V
    do += (first * HV + i_h) * V
    dq += (first * HV + i_h) * K
    dk += (first * HV + i_h) * K
    if WITH_W:
        dv += (first * HV + i_h) * V
        dw += (first * HV + i_h) * K
    dg += (i_k.to(tl.int64) * all_tokens + first) * HV + i_h
    states += (place * HV + i_h) * V * K
    d_states += (place * HV + i_h) * V * K

    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_t < left
    m_k = o_k < K
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    if WITH_W:
        b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    b_dp = tl.zeros([BT, BT], dtype=tl.float32)
    b_dp_t = tl.zeros([BT, BT], dtype=tl.float32)
    b_products = tl.zeros([BV, BK], dtype=tl.float32)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        p_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        p_vk = o_v[:, None] * K + o_k[None, :]
        m_vk = m_v[:, None] & m_k[None, :]
        b_v = tl.load(v_new + p_tv, mask=m_tv, other=0.0)
        b_do = tl.load(do + p_tv, mask=m_tv, other=0.0)
        b_s = tl.load(states + p_vk, mask=m_vk, other=0.0)
        b_ds = tl.load(d_states + p_vk, mask=m_vk, other=0.0)
        b_products += b_s.to(tl.float32) * b_ds.to(tl.float32)
        b_dp = tl.dot(b_do, tl.trans(b_v), b_dp)
        b_dp_t = tl.dot(b_v, tl.trans(b_do), b_dp_t)
        b_dq = tl.dot(b_do, b_s, b_dq)
        b_dk = tl.dot(b_v, b_ds, b_dk)
        if WITH_W:
            b_dv = tl.load(dv + p_tv, mask=m_tv, other=0.0)
            b_dw = tl.dot(b_dv, b_s, b_dw)

    p_tk = o_t[:, None] * (HV * K) + o_k[None, :]
    p_in = o_t[:, None] * (H * K) + o_k[None, :]
    m_tk = m_t[:, None] & m_k[None, :]
    if WITH_W:
        tl.store(dw + p_tk, (-b_dw).to(dw.dtype.element_ty), mask=m_tk)
    b_q = tl.load(q + p_in, mask=m_tk, other=0.0)
    b_k = tl.load(k + p_in, mask=m_tk, other=0.0)
    b_g = tl.load(g + o_t * HV, mask=m_t, other=0.0)
    last = tl.minimum(BT, left) - 1
    b_g_last = tl.load(g + last * HV)
    b_dq = b_dq * (tl.exp2(b_g) * scale)[:, None]
    b_dk = b_dk * tl.where(m_t, tl.exp2(b_g_last - b_g), 0.0)[:, None]
    b_dg_last = tl.sum(b_products) * tl.exp2(b_g_last) + tl.sum(b_dk * b_k.to(tl.float32))
    # queries t (rows) see keys s (columns); and the same, transposed
    b_dp = tl.where(
        (o_t[:, None] >= o_t[None, :]) & m_t[:, None], b_dp * tl.exp2(b_g[:, None] - b_g[None, :]) * scale, 0.0
    )
    b_dp_t = tl.where(
        (o_t[:, None] <= o_t[None, :]) & m_t[None, :], b_dp_t * tl.exp2(b_g[None, :] - b_g[:, None]) * scale, 0.0
    )
    b_dq = tl.dot(b_dp.to(b_k.dtype), b_k, b_dq)
    b_dk = tl.dot(b_dp_t.to(b_k.dtype), b_q, b_dk)
    b_dg = tl.sum(b_dq * b_q.to(tl.float32), axis=1) - tl.sum(b_dk * b_k.to(tl.float32), axis=1)
    b_dg += tl.where(o_t == last, b_dg_last, 0.0)
    tl.store(dq + p_tk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + p_tk, b_dk.to(dk.dtype.element_ty), mask=m_tk)
    tl.store(dg + o_t * HV, b_dg, mask=m_t)
