"""The output projection and the cross entropy in one operator that never holds all logits.

With T tokens and a vocabulary of V, the logits of a long row are the largest tensor of a training step (65,536 × 32,000
in bf16 are 4 GB), and several copies of them are alive at the peak. Here the tokens pass in chunks: a chunk's logits
give its losses and then, in their own memory, their gradients, which two products turn into those of the hidden states
and of the weight. Backward only scales what forward stored. The size of a chunk depends on the shapes alone, so that
the order of summation does too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flame.kernels.dispatch import LOSSES, choose_loss
from flame.kernels.loss_rows import LossTerms, RowLosses

_CHUNK_BYTES = 768 << 20
_SCRATCH_BYTES = 960 << 20
"""Of a chunk's logits and what the fp32 gradient of the weight takes beyond its own dtype."""
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
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    implementation: str = "auto",
    chunk_bytes: int | None = None,
) -> LossParts:
    """Return the cross entropy of `labels_T` under the logits `hidden_TD @ weight_VD.T + bias_V`, summed.

    Labels are integers of any width in `[0, V)` or `ignore_index`. `softcap` c makes logits c·tanh(logits / c) first;
    `z_loss` adds that much of log²(Σ exp logits) to the loss of each label; `label_smoothing` spreads that share of a
    label over the vocabulary. `implementation` is a name in `flame.kernels.dispatch.LOSSES`, or "auto".

    Products are taken in the inputs' own dtype, softmax and sums in fp32 (fp64 for fp64 inputs). Nothing waits for the
    device. A chunk's logits take at most `chunk_bytes`, by default `default_chunk_bytes` (more, if those of 128 tokens
    do), and "torch" three times that for fp32 copies. Gradients, where asked for, are made in forward and kept:
    `[T, D]` in the dtype of `hidden_TD`, and `[V, D]` in fp32. On a GPU, backward turns them into the result in their
    own memory, so that autograd refuses a second backward through the same graph. The graph of a compiled caller holds
    this as one operator.

    Source: the gradient of a logit is softmax − onehot; making it in forward follows Hsu et al. 2024, "Liger Kernel";
    z-loss is that of Chowdhery et al. 2022, "PaLM".
    """
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden_TD, weight_VD, bias_V)]
    loss_sum, losses_T, *_ = _operator(
        hidden_TD,
        weight_VD,
        bias_V,
        labels_T,
        ignore_index,
        softcap or 0.0,
        z_loss,
        label_smoothing,
        implementation,
        _chunk_tokens(hidden_TD, weight_VD, chunk_bytes or default_chunk_bytes(weight_VD)),
        wanted,
    )
    return LossParts(loss_sum, (labels_T != ignore_index).sum(), losses_T.detach())


@torch.library.custom_op("flame::linear_cross_entropy", mutates_args=())
def _operator(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    label_smoothing: float,
    implementation: str,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of losses, the losses, and the gradients of the first three arguments, empty if not `wanted`."""
    terms = LossTerms(ignore_index=ignore_index, softcap=softcap, z_loss=z_loss, label_smoothing=label_smoothing)
    chosen = LOSSES[choose_loss(implementation, device=hidden_TD.device, dtype=hidden_TD.dtype)]
    losses_T, *gradients = chunked_losses(hidden_TD, weight_VD, bias_V, labels_T, terms, chosen.run, chunk, wanted)
    d_hidden_TD, d_weight_VD, d_bias_V = gradients
    return losses_T.sum(), losses_T, d_hidden_TD, d_weight_VD, d_bias_V


def chunked_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    terms: LossTerms,
    losses_of_rows: RowLosses,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses and the gradients of hidden states, weight and bias, `chunk` tokens at a time."""
    num_tokens = hidden_TD.shape[0]
    assert num_tokens > 0, "a micro-batch has tokens"
    losses_T, d_hidden_TD, d_weight_VD, d_bias_V = _outputs(hidden_TD, weight_VD, bias_V, wanted)
    labels_T = labels_T.contiguous()
    buffer_CV = hidden_TD.new_empty(min(chunk, num_tokens), weight_VD.shape[0])
    for start in range(0, num_tokens, chunk):
        rows = slice(start, start + chunk)
        hidden_CD, labels_C = hidden_TD[rows], labels_T[rows]
        logits_CV = buffer_CV[: hidden_CD.shape[0]]
        if bias_V is None:
            torch.mm(hidden_CD, weight_VD.t(), out=logits_CV)
        else:
            torch.addmm(bias_V, hidden_CD, weight_VD.t(), out=logits_CV)
        losses_of_rows(logits_CV, labels_C, losses_T[rows], terms=terms, with_gradients=any(wanted))
        if wanted[0]:
            torch.mm(logits_CV, weight_VD, out=d_hidden_TD[rows])
        if wanted[1]:
            _add_product(d_weight_VD, logits_CV.t(), hidden_CD, first=start == 0)
        if wanted[2]:
            d_bias_V += logits_CV.sum(0, dtype=d_bias_V.dtype)
    return losses_T, d_hidden_TD, d_weight_VD, d_bias_V


def _outputs(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the losses and the gradients; the first chunk overwrites the weight's, so there must be one."""
    sum_dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    losses_T = hidden_TD.new_empty(hidden_TD.shape[0], dtype=sum_dtype)
    d_hidden_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if wanted[0] else _none(hidden_TD)
    d_weight_VD = hidden_TD.new_empty(weight_VD.shape, dtype=sum_dtype) if wanted[1] else _none(hidden_TD)
    d_bias_V = hidden_TD.new_zeros(weight_VD.shape[0], dtype=sum_dtype) if wanted[2] else _none(hidden_TD)
    return losses_T, d_hidden_TD, d_weight_VD, d_bias_V


def _none(like: Tensor) -> Tensor:
    """Stands for a gradient that is not wanted: an operator returns tensors only."""
    return like.new_empty(0)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add `left @ right` to `total` (the `first` overwrites it), unrounded where the device can."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif not left.is_cuda:
        total.copy_(left @ right) if first else total.add_(left @ right)
    elif first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


@_operator.register_fake
def _(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_T: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    losses_T, *gradients = _outputs(hidden_TD, weight_VD, bias_V, options[-1])
    return losses_T.new_empty(()), losses_T, *gradients


OPERATOR = torch.ops.flame.linear_cross_entropy.default


def scratch_bytes(hidden_TD: Tensor, weight_VD: Tensor, *others: Any) -> int:
    """Return what the operator, called with these arguments, takes beside its results: a chunk's logits."""
    chunk: int = others[-2]
    return min(chunk, hidden_TD.shape[0]) * weight_VD.shape[0] * hidden_TD.element_size()


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])
    ctx.wanted = inputs[-1]
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]


def _scaled_gradients(ctx: Any, d_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    assert all(other is None for other in others), "only the sum of losses has a gradient, and that has no second one"
    gradients = [
        _scaled(stored, d_loss, dtype) if wanted and d_loss is not None else None
        for stored, wanted, dtype in zip(ctx.saved_tensors, ctx.wanted, ctx.dtypes, strict=True)
    ]
    return *gradients, *(None,) * 8


_operator.register_autograd(_scaled_gradients, setup_context=_keep_gradients)


def _scaled(stored: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `stored × factor` in `dtype`, rounded once; on a GPU in the memory of `stored`."""
    if type(stored) is Tensor and stored.is_cuda:  # not what a compiler traces with
        return scaled_in_place(stored.detach(), factor, dtype)
    return torch.mul(stored, factor, out=torch.empty_like(stored, dtype=dtype))


def scaled_in_place(stored: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `stored × factor` in `dtype`, no wider than that of `stored`, at the front of its memory.

    A narrower result is written in pieces that double, each of which ends before what it is read from begins.
    """
    if dtype == stored.dtype:
        return stored.mul_(factor)
    flat, narrow = stored.view(-1), stored.view(-1).view(dtype)[: stored.numel()]
    done, end = 0, max(1, flat.numel() // 16)
    while done < flat.numel():
        source = flat[done:end] if done else flat[:end].clone()
        torch.mul(source, factor, out=narrow[done:end])
        done, end = end, min(2 * end, flat.numel())
    return narrow.view(stored.shape)


def default_chunk_bytes(weight_VD: Tensor) -> int:
    """Return the bytes of a chunk's logits with which the whole operator stays below 1 GiB beyond its gradients.

    Where the fp32 gradient of the weight leaves less than a quarter of that, the chunk takes the quarter all the same.
    """
    wider = max(0, 4 - weight_VD.element_size()) * weight_VD.numel()
    return min(_CHUNK_BYTES, max(_SCRATCH_BYTES // 4, _SCRATCH_BYTES - wider))


def _chunk_tokens(hidden_TD: Tensor, weight_VD: Tensor, chunk_bytes: int) -> int:
    """Return how many tokens' logits fit into `chunk_bytes`: a power of two, at least 128.

    Powers of two fill a GPU: with 132 multiprocessors and tiles of 128 × 256, the hidden states' gradients of 2,048
    tokens of width 2,048, or 4,096 of 1,024, are one wave of 128 tiles.
    """
    tokens = chunk_bytes // (hidden_TD.element_size() * weight_VD.shape[0])
    return max(_CHUNK_MULTIPLE, 1 << max(0, tokens.bit_length() - 1))
