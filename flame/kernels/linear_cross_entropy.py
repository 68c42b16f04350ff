"""The output projection and the cross entropy in one function that never holds all logits.

With T tokens and a vocabulary of V, the logits of a long row are the largest tensor of a training step (65,536 × 32,000
in fp32 are 8 GB), and three copies of them are alive at the peak. Here the tokens pass in chunks: a chunk's logits are
made, give its losses and, while they are at hand, the gradients of the hidden states and of the weight. Backward then
only scales what forward stored. The chunk size depends on the shapes alone, so that the order of summation does too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK_BYTES = 256 << 20
_CHUNK_MULTIPLE = 128


class LossParts(NamedTuple):
    """What a micro-batch contributes to a loss; sums, so that parts of a batch add up."""

    loss_sum: Tensor
    """Scalar, fp32: Σ of the losses in nats; the only part with a gradient."""
    num_labels: Tensor
    """Scalar, int64: how many labels are not ignored."""
    token_losses: Tensor
    """`[T]`, fp32: the loss of each token, 0 where its label is ignored."""


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> LossParts:
    """Return the cross entropy of `labels_T` under the logits `hidden_TD @ weight_VD.T + bias_V`, summed.

    Labels are integers of any width in `[0, V)` or `ignore_index`. Products are taken in the inputs' own dtype, softmax
    and sums in fp32 (fp64 for fp64 inputs). Nothing waits for the device. Peak memory beyond the results is about
    `2 × chunk_bytes`, of which a chunk's fp32 logits take one. Gradients, where asked for, are made in forward and
    kept: `[T, D]` in the dtype of `hidden_TD`, and `[V, D]` in fp32.

    Source: the gradient of a logit is softmax − onehot; making it in forward follows Hsu et al. 2024, "Liger Kernel".
    """
    chunk = _chunk_tokens(weight_VD.shape[0], chunk_bytes)
    wanted = (hidden_TD, weight_VD, bias_V)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted):
        return LossParts(*_LinearCrossEntropy.apply(hidden_TD, weight_VD, bias_V, labels_T, ignore_index, chunk))
    losses_T = torch.empty(hidden_TD.shape[0], dtype=_sum_dtype(hidden_TD), device=hidden_TD.device)
    for rows in _chunks(hidden_TD.shape[0], chunk):
        chunk_losses, *_ = _losses(hidden_TD[rows], weight_VD, bias_V, labels_T[rows], ignore_index)
        losses_T[rows] = chunk_losses
    return LossParts(losses_T.sum(), (labels_T != ignore_index).sum(), losses_T)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        ignore_index: int,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sum_dtype = _sum_dtype(hidden_TD)
        losses_T = torch.empty(hidden_TD.shape[0], dtype=sum_dtype, device=hidden_TD.device)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if needs_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=sum_dtype) if needs_bias and bias_V is not None else None
        for rows in _chunks(hidden_TD.shape[0], chunk):
            hidden_CD = hidden_TD[rows]
            losses_C, log_probs_CV, logits_CV, targets_C1, counts_C1 = _losses(
                hidden_CD, weight_VD, bias_V, labels_T[rows], ignore_index
            )
            losses_T[rows] = losses_C
            # softmax − onehot, made in place of the log-probabilities, then rounded into the logits' own memory
            probs_CV = log_probs_CV.exp_().scatter_add_(1, targets_C1, torch.full_like(counts_C1, -1, dtype=sum_dtype))
            d_logits_CV = torch.mul(probs_CV, counts_C1, out=logits_CV)
            if d_hidden_TD is not None:
                torch.mm(d_logits_CV, weight_VD, out=d_hidden_TD[rows])
            if d_weight_VD is not None:
                _add_product(d_weight_VD, d_logits_CV.t(), hidden_CD)
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0, dtype=sum_dtype)
        ctx.save_for_backward(d_hidden_TD, d_weight_VD, d_bias_V)
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        num_labels = (labels_T != ignore_index).sum()
        ctx.mark_non_differentiable(num_labels, losses_T)
        return losses_T.sum(), num_labels, losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if stored is None else _scaled(stored, d_loss, dtype)
            for stored, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None)


def _losses(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_C: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a chunk's losses, log-probabilities, logits, targets `[C, 1]`, and whether each row counts `[C, 1]`."""
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
    log_probs_CV = torch.log_softmax(logits_CV, dim=-1, dtype=_sum_dtype(hidden_CD))
    counts_C1 = (labels_C != ignore_index).unsqueeze(1)
    targets_C1 = labels_C.unsqueeze(1).long().where(counts_C1, 0)
    losses_C1 = log_probs_CV.gather(1, targets_C1).neg_().where(counts_C1, 0)
    return losses_C1.squeeze(1), log_probs_CV, logits_CV, targets_C1, counts_C1


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` without rounding the product to the factors' dtype where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(stored: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `stored × factor` in `dtype`, in one pass and without an fp32 copy; `stored` is left as it is."""
    return torch.mul(stored, factor, out=torch.empty_like(stored, dtype=dtype))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunk_tokens(vocabulary: int, chunk_bytes: int) -> int:
    """Return how many tokens' fp32 logits fit into `chunk_bytes`: a multiple of 128, at least 128."""
    tokens = chunk_bytes // (4 * vocabulary)
    return max(_CHUNK_MULTIPLE, tokens // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE)


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
