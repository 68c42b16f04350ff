"""Plain torch definitions of every kernel here: slow, obvious, and what the others are tested against.

Each materialises what the real one avoids (all logits, all scores), so they are for small shapes only.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum of losses, number of labels, loss of each token), losses in nats, 0 where the label is ignored."""
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    logits_TV = F.linear(hidden_TD, weight_VD, bias_V).to(dtype)
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    losses_T = F.cross_entropy(
        logits_TV,
        labels_T.long(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counts_T = labels_T != ignore_index
    losses_T = losses_T + z_loss * logits_TV.logsumexp(1).square() * counts_T
    return losses_T.sum(), counts_T.sum(), losses_T.detach()


def varlen_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention `[T, H, D]` within each sequence: softmax over a block-diagonal lower triangle.

    `q_THD` has H heads, `k_TGD` and `v_TGD` have G, a divisor of H: query head h reads key head h // (H / G). With a
    `window` a token sees itself and the `window` − 1 tokens before it; `softcap` c makes scores c·tanh(scores / c).
    """
    num_tokens, num_heads, _ = q_THD.shape
    group = num_heads // k_TGD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_TGD, v_TGD))
    index_T = torch.arange(num_tokens, device=q_THD.device)
    sequence_T = torch.bucketize(index_T, cu_seqlens[1:].long(), right=True)
    distance_TT = index_T[:, None] - index_T[None, :]
    visible_TT = (sequence_T[:, None] == sequence_T[None, :]) & (distance_TT >= 0)
    if window is not None:
        visible_TT &= distance_TT < window
    scores_HTT = torch.einsum("qhd,khd->hqk", q_THD, k_THD) * scale
    if softcap is not None:
        scores_HTT = softcap * torch.tanh(scores_HTT / softcap)
    weights_HTT = scores_HTT.masked_fill(~visible_TT, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights_HTT, v_THD)


def short_convolution(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None, *, cu_seqlens: Tensor, silu: bool = False
) -> Tensor:
    """Return the causal depthwise convolution `[T, C]` of each sequence by itself; the last tap is the token's own."""
    num_channels, num_taps = weight_CW.shape
    sequences = []
    for x_LC in x_TC.split(cu_seqlens.diff().tolist()):
        padded_CL = F.pad(x_LC.t(), (num_taps, 0))  # one more than the taps need: a sequence may be empty
        z_CL = F.conv1d(padded_CL, weight_CW[:, None], bias_C, groups=num_channels)[:, 1:]
        sequences.append((F.silu(z_CL) if silu else z_CL).t())
    return torch.cat(sequences)


def gated_linear_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, cu_seqlens: Tensor, *, scale: float
) -> Tensor:
    """Return `[1, T, H, V]`: o_t = scale · Sᵀ_t q_t, where S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ begins at 0."""
    starts = set(cu_seqlens.tolist())
    outs, state_HKV = [], torch.zeros(())
    for t in range(q_BTHK.shape[1]):
        q_HK, k_HK, v_HV, g_HK = (x[0, t] for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK))
        written_HKV = k_HK[:, :, None] * v_HV[:, None]
        state_HKV = written_HKV if t in starts else g_HK.exp()[:, :, None] * state_HKV + written_HKV
        outs.append(scale * torch.einsum("hkv,hk->hv", state_HKV, q_HK))
    return torch.stack(outs)[None]


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor | None,
    cu_seqlens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Return `[1, T, H, V]`: o_t = scale · S_t q_t, where S_t = exp g_t · S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

    S, which is V × K, begins at 0 in each sequence. Without β it is S_t = exp g_t · S_{t−1} + v_t k_tᵀ.
    """
    outs = []
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        state_HVK = v_BTHV.new_zeros(*v_BTHV.shape[2:], k_BTHK.shape[-1])
        for t in range(start, stop):
            q_HK, k_HK, v_HV = (x[0, t] for x in (q_BTHK, k_BTHK, v_BTHV))
            state_HVK = state_HVK * g_BTH[0, t].exp()[:, None, None]
            if beta_BTH is not None:
                v_HV = (v_HV - torch.einsum("hvk,hk->hv", state_HVK, k_HK)) * beta_BTH[0, t][:, None]
            state_HVK = state_HVK + v_HV[:, :, None] * k_HK[:, None]
            outs.append(scale * torch.einsum("hvk,hk->hv", state_HVK, q_HK))
    return torch.stack(outs)[None]
