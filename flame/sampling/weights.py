"""Proportions of sources: by size, evened out, with a floor or a cap on repeats, on the way to others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flame.sampling.interleave import TABLE_SLOTS


def tempered(num_tokens: Sequence[int], temperature: float) -> list[float]:
    """Return proportions: tokens to the power of 1/temperature, normalised. Source: Conneau & Lample 2019 (XLM)."""
    largest = max(num_tokens)
    powers = [(count / largest) ** (1 / temperature) if count else 0.0 for count in num_tokens]
    return [power / math.fsum(powers) for power in powers]


def floored(proportions: Sequence[float], least: float) -> list[float]:
    """Return proportions none of which is below `least`; the others keep theirs to one another and sum to what is left.

    `least` times their number is at most 1.
    """
    raised: set[int] = set()
    while True:
        left = math.fsum(share for i, share in enumerate(proportions) if i not in raised)
        scale = (1 - least * len(raised)) / left if left else 0.0
        below = {i for i, share in enumerate(proportions) if i not in raised and share * scale < least}
        if not below:
            return [least if i in raised else share * scale for i, share in enumerate(proportions)]
        raised |= below


def unimax(num_tokens: Sequence[int], budget: int, max_epochs: float) -> list[float]:
    """Return proportions that spread `budget` tokens evenly, but draw no source more than `max_epochs` times.

    The smallest sources reach their cap first; what they leave is spread evenly over the others. Where all sources
    together, repeated `max_epochs` times, are less than the budget, each is in proportion to its tokens. A share at its
    cap is rounded down to whole slots of the table, so that the weights do not pass the cap. Source: Chung et al. 2023
    (UniMax).
    """
    left, drawn = float(budget), [0.0] * len(num_tokens)
    enough = max_epochs * sum(num_tokens) > budget
    by_size = sorted(range(len(num_tokens)), key=lambda i: (num_tokens[i], i))
    for position, i in enumerate(by_size):
        cap, even = max_epochs * num_tokens[i], left / (len(by_size) - position)
        slots = int(cap) * TABLE_SLOTS // budget if enough else 0
        drawn[i] = even if even <= cap else slots * budget / TABLE_SLOTS if slots else cap
        left -= drawn[i]
    total = math.fsum(drawn)
    return [tokens / total for tokens in drawn]


def ramp(before: Sequence[float], after: Sequence[float], num_steps: int) -> list[list[float]]:
    """Return the proportions of a linear way from `before` to `after` in `num_steps` level steps of one length.

    Each step has the proportions of its middle, so that as much is drawn of each source as on the straight line.
    """
    middles = [(step + 0.5) / num_steps for step in range(num_steps)]
    return [[one + (other - one) * at for one, other in zip(before, after, strict=True)] for at in middles]
