"""The learning rate as a pure function of the step: warm-up, a flat stretch, decay."""

from __future__ import annotations

import math
from collections.abc import Callable

# How high the rate still is, from 1 to 0, when the share p (0 to 1) of the way down is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - math.sqrt(p),
    "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
}


def lr_factor(
    step: int, *, warmup_steps: int, total_steps: int, decay_ratio: float | None, decay_type: str, lr_min: float
) -> float:
    """Return the factor on the learning rate that the 0-based `step` uses.

    Warm-up rises by 1/W a step to 1. The decay takes D = round(N·decay_ratio) steps, or all after warm-up if absent,
    and never more than those. It ends at `lr_min` one step after the last, so that the last step still moves.
    """
    W, N = warmup_steps, total_steps
    if step < W:
        return (step + 1) / W
    after_warmup = max(N - W, 0)
    D = after_warmup if decay_ratio is None else min(round(N * decay_ratio), after_warmup)
    S = N + 1 - W - D
    if step < W + S or D == 0:
        return 1.0
    p = min((step + 1 - W - S) / D, 1.0)
    return lr_min + (1 - lr_min) * SCHEDULES[decay_type](p)
