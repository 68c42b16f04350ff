"""Which implementation of a kernel runs: a table to look it up in, and one function to choose.

The choice is made once, at start, and the log names it. A name that was asked for and cannot run here is an error, and
under `training.deterministic` an implementation that has not been shown to be deterministic is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flame.errors import UsageError
from flame.kernels.varlen_attention import Attention, sdpa_attention, torch_varlen_attention


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute a kernel.

    `refusal(device, dtype, head_dim)` says why it cannot run there, or None. `deterministic` tells whether two equal
    calls have been shown to give the same bits, forward and backward, under `torch.use_deterministic_algorithms(True)`.
    """

    run: Attention
    refusal: Callable[[torch.device, torch.dtype, int], str | None]
    deterministic: bool


def _torch_varlen_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this one is {device.type}"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, and training.mixed_precision_param is {dtype}".replace("torch.", "")
    if head_dim > 256:
        return f"it takes heads of up to 256, and these have {head_dim}"
    return None


def _no_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None


ATTENTION: dict[str, Implementation] = {
    "torch_varlen": Implementation(run=torch_varlen_attention, refusal=_torch_varlen_refusal, deterministic=True),
    "sdpa": Implementation(run=sdpa_attention, refusal=_no_refusal, deterministic=True),
}
"""Implementations of attention over packed documents, the fastest first."""


def choose_attention(
    requested: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> str:
    """Return the name in `ATTENTION` to use: `requested`, or with "auto" the first that runs here.

    Raises `UsageError` if the name is unknown, cannot run here, or is not deterministic where that is asked for.
    """
    refusals: dict[str, str | None] = {}
    for name, implementation in ATTENTION.items():
        refusals[name] = implementation.refusal(device, dtype, head_dim)
        if deterministic and not implementation.deterministic:
            refusals[name] = "training.deterministic is on, and it has not been shown to be deterministic"
    usable = [name for name, refusal in refusals.items() if refusal is None]
    if requested == "auto":
        return usable[0]
    if requested not in ATTENTION:
        raise UsageError(
            "there is no such implementation of attention",
            got=requested,
            expected="auto, " + ", ".join(ATTENTION),
        )
    if refusals[requested] is not None:
        raise UsageError(
            f"the attention implementation {requested} cannot be used here: {refusals[requested]}",
            expected="auto, " + ", ".join(usable),
            fix="Leave the choice at auto, or name one of these",
        )
    return requested
