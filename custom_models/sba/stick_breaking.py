"""Stick-breaking attention over packed documents: a plain torch form, and the choice between it and the kernel.

Query j breaks a stick of length 1 from the nearest key on. Of what is left it gives key i < j the share beta_ij:

    z_ij = q_j · k_i · scale        beta_ij = sigmoid(z_ij)        A_ij = beta_ij · prod_{i < k < j} (1 − beta_kj)

and o_j = sum_i A_ij v_i. What no key takes is lost, so that the first token of a document attends to nothing and gets
zeros. Nearer keys come first, so that no other word about positions is needed. In logarithms, so that long products do
not vanish: log A_ij = logsigmoid(z_ij) + sum_{i < k < j} logsigmoid(−z_kj).

Source: Tan et al. 2024, "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study".
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def stick_breaking(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float) -> Tensor:
    """Return `[T, H, D]` of documents that do not see each other, in the dtype of `v`.

    `q` is `[T, H, D]`, `k` and `v` are `[T, G, D]` with G that divides H; document n has the tokens from
    `cu_seqlens[n]` to `cu_seqlens[n + 1]`, and none has more than `max_seqlen`. The kernel on a GPU, torch
    elsewhere; scores and their sums are fp32.
    """
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if q.is_cuda:
        from .stick_breaking_triton import triton_stick_breaking  # there may be no triton where there is no GPU

        return triton_stick_breaking(q, k, v, cu_seqlens, max_seqlen, scale)
    return torch_stick_breaking(q, k, v, cu_seqlens, scale)


def torch_stick_breaking(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """The same of `[T, H, D]` each, in memory of the square of the longest document."""
    documents = [
        _document(q[start:stop], k[start:stop], v[start:stop], scale) for start, stop in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(documents)


def _document(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    q_HTD, k_HTD, v_HTD = (x.transpose(0, 1).to(wide) for x in (q_THD, k_THD, v_THD))
    z_HTT = q_HTD @ k_HTD.transpose(1, 2) * scale
    before = torch.ones_like(z_HTT[0], dtype=torch.bool).tril(-1)
    log_rest = F.logsigmoid(-z_HTT).masked_fill(~before, 0.0)
    nearer = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest  # of the keys between i and j
    weights = (F.logsigmoid(z_HTT) + nearer).exp().masked_fill(~before, 0.0)
    return (weights @ v_HTD).transpose(0, 1).to(v_THD.dtype)
