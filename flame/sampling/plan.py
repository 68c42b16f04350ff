"""How much of each source a run of some length draws, and whether that stays below the caps on epochs. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from flame.errors import MixtureError
from flame.sampling.interleave import TABLE_SLOTS
from flame.sampling.mixture import Mixture


@dataclass(frozen=True, kw_only=True)
class SourcePlan:
    """What one stage draws of one source.

    `proportion` is in tokens; `share_of_documents` is the same in documents, as if each had its source's mean length.
    `tokens_drawn` are the stage's, `epochs` count from the start of the run to the stage's end. None is unknown.
    """

    name: str
    num_tokens: int
    proportion: float
    share_of_documents: float | None
    tokens_drawn: int | None
    epochs: float | None
    max_epochs: float | None


def stage_lengths(mixture: Mixture, num_tokens: int | None) -> list[int | None]:
    """Return how many of a run's `num_tokens` each stage draws; the last is None for a run of unknown length."""
    starts = [stage.start_tokens for stage in mixture.stages]
    if num_tokens is None:
        return [after - before for before, after in itertools.pairwise(starts)] + [None]
    stops = [*starts[1:], num_tokens]
    return [max(0, min(stop, num_tokens) - start) for start, stop in zip(starts, stops, strict=True)]


def plan_stages(
    mixture: Mixture, documents: Sequence[int | None], num_tokens: int | None
) -> list[tuple[SourcePlan, ...]]:
    """Return a plan a stage, a row a source. `documents` are the sources' numbers of them, None where unknown."""
    drawn_before: list[int] | None = [0] * len(mixture.sources)
    plans = []
    for stage, length in zip(mixture.stages, stage_lengths(mixture, num_tokens), strict=True):
        shares = _shares_of_documents(mixture, documents, stage.weights)
        drawn = None if length is None else _dealt(length, stage.weights)
        until = None if drawn is None or drawn_before is None else list(map(sum, zip(drawn_before, drawn, strict=True)))
        plans.append(
            tuple(
                SourcePlan(
                    name=source.name,
                    num_tokens=source.num_tokens,
                    proportion=stage.weights[i] / TABLE_SLOTS,
                    share_of_documents=None if shares is None else shares[i],
                    tokens_drawn=None if drawn is None else drawn[i],
                    epochs=None if until is None else until[i] / max(1, source.num_tokens),
                    max_epochs=source.max_epochs,
                )
                for i, source in enumerate(mixture.sources)
            )
        )
        drawn_before = until
    return plans


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A source that a run repeats more often than its `max_epochs`."""

    name: str
    epochs: float
    max_epochs: float


def check_epochs(mixture: Mixture, num_tokens: int) -> None:
    """Raise `MixtureError` if a run of `num_tokens` repeats a source beyond its `max_epochs`, by shares of tokens.

    `flame-train` counts windows instead (`position.check_windows_drawn`), once it knows how long they are.
    """
    most = {source.name: longest_run(mixture, source.name) for source in mixture.sources if source.max_epochs}
    over = [
        Repeated(name=row.name, epochs=row.epochs, max_epochs=row.max_epochs)
        for row in plan_stages(mixture, [None] * len(mixture.sources), num_tokens)[-1]
        if row.max_epochs is not None and row.epochs is not None and num_tokens > most[row.name]
    ]
    if over:
        refuse_repeats(over, num_tokens, most_tokens=int(min(most[source.name] for source in over)))


def refuse_repeats(over: Sequence[Repeated], num_tokens: int, *, most_tokens: int) -> NoReturn:
    """Raise the `MixtureError` for sources that a run of `num_tokens` repeats beyond their caps."""
    raise MixtureError(
        "the run would repeat " + ("a source" if len(over) == 1 else "sources") + " beyond max_epochs",
        got="; ".join(f"{source.name!r}: {_told(source)} epochs of at most {source.max_epochs:g}" for source in over)
        + f"; for {num_tokens:,} tokens",
        expected=f"at most {most_tokens:,} tokens with these weights and caps",
        fix="Train on fewer tokens, lower the weight, add data, or raise max_epochs",
    )


def longest_run(mixture: Mixture, name: str) -> float:
    """Return the most tokens a run can have before the source `name` passes its cap; inf where it never does."""
    i = next(i for i, source in enumerate(mixture.sources) if source.name == name)
    source = mixture.sources[i]
    assert source.max_epochs is not None, "a source with a cap"
    left = int(source.max_epochs * source.num_tokens) * TABLE_SLOTS  # in slot-tokens
    for stage, length in zip(mixture.stages, stage_lengths(mixture, None), strict=True):
        weight = stage.weights[i]
        if weight and (length is None or weight * length > left):
            return stage.start_tokens + left // weight
        left -= weight * (length or 0)
    return math.inf


def _told(source: Repeated) -> str:
    """Return the epochs of a source with as many digits as tell them from its cap, and three at least."""
    digits = next((d for d in range(3, 9) if round(source.epochs, d) > source.max_epochs), 9)
    return f"{source.epochs:.{digits}f}"


def _dealt(length: int, weights: Sequence[int]) -> list[int]:
    """Return what each source gives of `length` tokens: whole numbers that sum to it (largest remainder)."""
    drawn = [weight * length // TABLE_SLOTS for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(weights[i] * length % TABLE_SLOTS), i))
    for i in by_remainder[: length - sum(drawn)]:
        drawn[i] += 1
    return drawn


def _shares_of_documents(
    mixture: Mixture, documents: Sequence[int | None], weights: Sequence[int]
) -> list[float] | None:
    drawn = []
    for source, count, weight in zip(mixture.sources, documents, weights, strict=True):
        if count is None and weight:
            return None
        drawn.append(weight * (count or 0) / max(1, source.num_tokens))
    total = sum(drawn)
    return [value / total for value in drawn] if total else None
