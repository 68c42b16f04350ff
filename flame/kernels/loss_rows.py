"""What a chunk's logits give: the loss of each row, and in their own memory the gradient of that loss.

A row's loss is a function of four numbers: its largest logit, the sum of exponentials under it, the target's logit and
the sum of all logits (for label smoothing). So the work has two halves, `row_statistics` and `row_gradients`, between
which ranks that each hold a part of the vocabulary could join theirs; on one rank a Triton kernel does both in turn.

With l = logits, capped to c·tanh(l / c) if there is a soft cap c, and lse = log Σ exp l, the loss of label y is
lse − (1 − ε)·l_y − ε·mean(l) + z·lse², and its gradient by l_j is p_j·(1 + 2z·lse) − (1 − ε)·[j = y] − ε / V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

RowLosses = Callable[..., None]
"""`(logits_CV, labels_C, losses_C, *, terms, with_gradients)`: writes `losses_C`, and gradients over `logits_CV`."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the loss is, beside the cross entropy."""

    ignore_index: int = -100
    """A label that takes no part."""
    softcap: float = 0.0
    """Logits are capped to ± this, smoothly; 0: not capped."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator."""
    label_smoothing: float = 0.0
    """Share of a label's weight that is spread over the vocabulary."""


class RowStatistics(NamedTuple):
    """Four numbers a row, `[C]` each, from which its loss follows; those of parts of a vocabulary can be joined."""

    largest: Tensor
    exp_sum: Tensor
    """Σ exp(l − largest)."""
    target: Tensor
    """The label's logit; 0 where it is in no part of the vocabulary seen here."""
    total: Tensor
    """Σ l."""


def torch_losses(
    logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, *, terms: LossTerms, with_gradients: bool
) -> None:
    """Write the losses of a chunk's rows, and with `with_gradients` their gradients over its logits: in plain torch."""
    statistics = row_statistics(logits_CV, labels_C, terms)
    losses_C.copy_(losses_of(statistics, labels_C, logits_CV.shape[1], terms))
    if with_gradients:
        row_gradients(logits_CV, labels_C, statistics, terms)


def row_statistics(logits_CV: Tensor, labels_C: Tensor, terms: LossTerms) -> RowStatistics:
    """Return the four numbers of each row, in fp32 (fp64 for fp64 logits)."""
    capped_CV = _capped(logits_CV, terms)
    target_C1 = _targets(labels_C, terms).unsqueeze(1)
    target_C = capped_CV.gather(1, target_C1).squeeze(1)
    largest_C = capped_CV.amax(1)
    total_C = capped_CV.sum(1) if terms.label_smoothing else torch.zeros_like(largest_C)
    exp_sum_C = capped_CV.sub_(largest_C.unsqueeze(1)).exp_().sum(1)
    return RowStatistics(largest_C, exp_sum_C, target_C, total_C)


def losses_of(statistics: RowStatistics, labels_C: Tensor, vocabulary: int, terms: LossTerms) -> Tensor:
    """Return the loss of each row, 0 where its label is ignored."""
    lse_C = statistics.largest + statistics.exp_sum.log()
    losses_C = lse_C - (1 - terms.label_smoothing) * statistics.target + terms.z_loss * lse_C.square()
    if terms.label_smoothing:
        losses_C -= terms.label_smoothing / vocabulary * statistics.total
    return losses_C.where(labels_C != terms.ignore_index, 0)


def row_gradients(logits_CV: Tensor, labels_C: Tensor, statistics: RowStatistics, terms: LossTerms) -> None:
    """Overwrite the logits with the gradient of the sum of losses; zeros where a label is ignored."""
    smoothing, vocabulary = terms.label_smoothing, logits_CV.shape[1]
    counts_C1 = (labels_C != terms.ignore_index).unsqueeze(1)
    lse_C1 = (statistics.largest + statistics.exp_sum.log()).unsqueeze(1)
    capped_CV = _capped(logits_CV, terms)
    slope_CV = 1 - (capped_CV / terms.softcap).square() if terms.softcap else None
    gradient_CV = capped_CV.sub_(lse_C1).exp_().mul_(1 + 2 * terms.z_loss * lse_C1)
    gradient_CV -= smoothing / vocabulary
    hit_C1 = torch.full_like(lse_C1, smoothing - 1)
    gradient_CV.scatter_add_(1, _targets(labels_C, terms).unsqueeze(1), hit_C1)
    if slope_CV is not None:
        gradient_CV *= slope_CV
    torch.mul(gradient_CV, counts_C1, out=logits_CV)


def _capped(logits_CV: Tensor, terms: LossTerms) -> Tensor:
    """Return a copy of the logits in the dtype of sums, capped."""
    wide_CV = torch.empty_like(logits_CV, dtype=torch.promote_types(logits_CV.dtype, torch.float32)).copy_(logits_CV)
    return wide_CV.div_(terms.softcap).tanh_().mul_(terms.softcap) if terms.softcap else wide_CV


def _targets(labels_C: Tensor, terms: LossTerms) -> Tensor:
    return labels_C.long().where(labels_C != terms.ignore_index, 0)
