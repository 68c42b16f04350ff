"""Which implementation of a kernel runs: a table for each kernel to look it up in, and a function to choose.

The choice is made once in a process, and the log names it at start. A name that was asked for and cannot run here is an
error, and under `training.deterministic` an implementation that has not been shown to be deterministic is refused.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flame.errors import UsageError
from flame.kernels.loss_rows import RowLosses, torch_losses
from flame.kernels.short_convolution_torch import torch_backward, torch_forward
from flame.kernels.varlen_attention import (
    Attention,
    fa4_attention,
    sdpa_attention,
    torch_varlen_attention,
)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute attention over packed documents.

    `refusal(device, dtype, head_dim)` says why it cannot run there, or None. `deterministic` tells whether two equal
    calls have been shown to give the same bits, forward and backward, under `torch.use_deterministic_algorithms(True)`;
    `softcaps`, whether it can cap scores. All take sliding windows and fewer key heads than query heads.
    """

    run: Attention
    refusal: Callable[[torch.device, torch.dtype, int], str | None]
    deterministic: bool
    softcaps: bool = True


@dataclass(frozen=True, kw_only=True)
class LossImplementation:
    """One way to compute the losses of a chunk's logits; `refusal(device, dtype)` says why it cannot run, or None."""

    run: RowLosses
    refusal: Callable[[torch.device, torch.dtype], str | None]


@dataclass(frozen=True, kw_only=True)
class ConvolutionImplementation:
    """One way to compute a short convolution and its gradients; `refusal(device, dtype)` as above."""

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    refusal: Callable[[torch.device, torch.dtype], str | None]


def _gpu_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this one is {device.type}"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, and training.mixed_precision_param is {dtype}".replace("torch.", "")
    if head_dim > 256:
        return f"it takes heads of up to 256, and these have {head_dim}"
    if head_dim % 8:
        return f"it takes heads whose dimension is a multiple of 8, and these have {head_dim}"
    return None


def _fa4_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if not _installed("flash_attn.cute"):
        return "it needs the package flash-attn-4 (the extra fa4)"
    refusal = _gpu_refusal(device, dtype, head_dim)
    if refusal is None and torch.cuda.get_device_capability(device)[0] != 9:
        return "it is used on GPUs of compute capability 9.0 (H100, H200) only: no other was tried"
    return refusal


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _no_refusal(*_: Any) -> str | None:
    return None


def _triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _installed("triton"):
        return "it needs the package triton"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device, and this one is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, and not {dtype}".replace("torch.", "")
    return None


def _triton_losses(*args: Any, **options: Any) -> None:
    from flame.kernels.loss_rows_triton import triton_losses  # imports triton

    triton_losses(*args, **options)


def _triton_convolution(*args: Any) -> torch.Tensor:
    from flame.kernels.short_convolution_triton import triton_forward

    return triton_forward(*args)


def _triton_convolution_backward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    from flame.kernels.short_convolution_triton import triton_backward

    return triton_backward(*args)


ATTENTION: dict[str, Implementation] = {
    "fa4": Implementation(run=fa4_attention, refusal=_fa4_refusal, deterministic=True),
    "torch_varlen": Implementation(
        run=torch_varlen_attention, refusal=_gpu_refusal, deterministic=True, softcaps=False
    ),
    "sdpa": Implementation(run=sdpa_attention, refusal=_no_refusal, deterministic=True),
}
"""Implementations of attention over packed documents, the fastest first."""

LOSSES: dict[str, LossImplementation] = {
    "triton": LossImplementation(run=_triton_losses, refusal=_triton_refusal),
    "torch": LossImplementation(run=torch_losses, refusal=_no_refusal),
}
"""Implementations of the loss of `linear_cross_entropy`, the fastest first; all are deterministic."""

CONVOLUTIONS: dict[str, ConvolutionImplementation] = {
    "triton": ConvolutionImplementation(
        forward=_triton_convolution, backward=_triton_convolution_backward, refusal=_triton_refusal
    ),
    "torch": ConvolutionImplementation(forward=torch_forward, backward=torch_backward, refusal=_no_refusal),
}
"""Implementations of the short convolution, the fastest first; all are deterministic."""


def choose_attention(
    requested: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    softcap: bool = False,
) -> str:
    """Return the name in `ATTENTION` to use: `requested`, or with "auto" the first that runs here.

    Raises `UsageError` if the name is unknown, cannot run here, cannot cap scores where the model does (`softcap`), or
    is not deterministic where that is asked for.
    """
    refusals: dict[str, str | None] = {}
    for name, implementation in ATTENTION.items():
        refusals[name] = implementation.refusal(device, dtype, head_dim)
        if softcap and not implementation.softcaps:
            refusals[name] = "it cannot cap attention scores, as the model does"
        if deterministic and not implementation.deterministic:
            refusals[name] = "training.deterministic is on, and it has not been shown to be deterministic"
    return _chosen("attention", requested, refusals)


def choose_loss(requested: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name in `LOSSES` to use: `requested`, or with "auto" the first that runs here.

    Raises `UsageError` if the name is unknown or cannot run here.
    """
    refusals = {name: implementation.refusal(device, dtype) for name, implementation in LOSSES.items()}
    return _chosen("linear cross entropy", requested, refusals)


def choose_convolution(requested: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name in `CONVOLUTIONS` to use: `requested`, or with "auto" the first that runs here.

    Raises `UsageError` if the name is unknown or cannot run here.
    """
    refusals = {name: implementation.refusal(device, dtype) for name, implementation in CONVOLUTIONS.items()}
    return _chosen("short convolution", requested, refusals)


WALKED_KEYS = 128
"""Columns of a gated delta rule's state that a register tile of our walks holds; a state has one tile or two."""
WALKED_VALUES = 64
"""Rows of such a state that a program of our walks keeps at the least: the matrix units take 64."""


def walks_refusal(*, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Return why our walks along documents do not carry a gated delta rule's states here, or None: then fla's do."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"ours need a CUDA device, and this one is {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return "ours are written for compute capability 9.0 (H100, H200)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"ours take bfloat16 and float16, and not {dtype}".replace("torch.", "")
    if not 16 <= key_dim <= 2 * WALKED_KEYS or key_dim % 16 or value_dim % WALKED_VALUES:
        return (
            f"ours take keys of 16 to {2 * WALKED_KEYS} in steps of 16 and values in steps of {WALKED_VALUES}, and "
            f"these have {key_dim} and {value_dim}"
        )
    return None


def _chosen(kernel: str, requested: str, refusals: Mapping[str, str | None]) -> str:
    usable = [name for name, refusal in refusals.items() if refusal is None]
    if requested == "auto":
        return usable[0]
    if requested not in refusals:
        raise UsageError(
            f"there is no such implementation of {kernel}", got=requested, expected="auto, " + ", ".join(refusals)
        )
    if refusals[requested] is not None:
        raise UsageError(
            f"the {kernel} implementation {requested} cannot be used here: {refusals[requested]}",
            expected="auto, " + ", ".join(usable),
            fix="Leave the choice at auto, or name one of these",
        )
    return requested
