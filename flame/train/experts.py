"""Mixtures of experts: the loss that asks a router to use its experts evenly, taken window by window.

The loss is that of transformers' models, of all layers together: with f_e the share of tokens that go to expert e (each
token goes to k, so that they add up to k) and p_e the router's mean probability of it, E · Σ f_e · p_e. It is a product
of means, so that of a whole batch is no sum over its parts. Of a window it is: however windows are dealt to
micro-batches and ranks, the gradient of a step is the same, and the mean over windows, weighted by labels.
Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(router_logits: Sequence[Tensor], labelled_T: Tensor, *, top_k: int, window_len: int) -> Tensor:
    """Return the scalar Σ over windows of their number of labels times their loss; fp32.

    `router_logits` are those of each layer with experts, `[T, E]`. Tokens whose `labelled_T` is false (padding, a
    document's last) count in neither mean: nothing that is learnt follows from where they go. `window_len` divides T.
    """
    mask_T1 = labelled_T.float()[:, None]
    counts_WE, probabilities_WE = None, None
    for logits_TE in router_logits:
        probabilities_TE = logits_TE.float().softmax(-1)
        chosen_Tk = probabilities_TE.topk(top_k, dim=-1).indices
        sent_TE = torch.zeros_like(probabilities_TE).scatter_(1, chosen_Tk, 1.0)
        counts = (sent_TE * mask_T1).unflatten(0, (-1, window_len)).sum(1)
        probabilities = (probabilities_TE * mask_T1).unflatten(0, (-1, window_len)).sum(1)
        counts_WE = counts if counts_WE is None else counts_WE + counts
        probabilities_WE = probabilities if probabilities_WE is None else probabilities_WE + probabilities
    assert counts_WE is not None and probabilities_WE is not None, "some layer has experts"
    num_experts = counts_WE.shape[1]
    labels_W = mask_T1.unflatten(0, (-1, window_len)).sum((1, 2)).clamp(min=1)  # a window without labels adds 0
    # n · E · Σ_e (counts / L·n) · (probabilities / L·n)
    each_W = (counts_WE.detach() * probabilities_WE).sum(1) * num_experts / (len(router_logits) ** 2 * labels_W)
    return each_W.sum()
