"""How often each value occurs among very many whole numbers, exactly, in little memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The values from `low` to `high`, both included: how many they are, and their sum."""

    low: int
    high: int
    count: int
    sum: int


@dataclass(frozen=True)
class Distribution:
    """Distinct values, rising, and the count of each.

    Lengths of documents have few distinct values, however many documents there are: N different ones need N²/2 tokens,
    so 10^12 tokens have 1.4 million at most, and commonly some ten thousand.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: NDArray[np.integer]) -> Distribution:
        """Return the distribution of these numbers, which are 0 or more."""
        values, counts = np.unique(numbers.astype(np.int64), return_counts=True)
        return cls(values, counts.astype(np.int64))

    @classmethod
    def sum_of(cls, parts: Iterable[Distribution]) -> Distribution:
        """Return the distribution of what the parts are distributions of, taken together."""
        parts = list(parts)
        values = np.concatenate([np.empty(0, np.int64), *(part.values for part in parts)])
        counts = np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])
        if not len(values):
            return cls(values, counts)
        order = np.argsort(values, kind="stable")
        values, counts = values[order], counts[order]
        starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
        return cls(values[starts], np.add.reduceat(counts, starts))

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def sum(self) -> int:
        return int((self.values * self.counts).sum())

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def percentile(self, percent: float) -> int | None:
        """Return the smallest value that `percent` of the numbers do not exceed (nearest rank); None of none."""
        if not self.count:
            return None
        rank = max(1, int(np.ceil(percent * self.count / 100)))
        return int(self.values[np.searchsorted(np.cumsum(self.counts), rank)])

    def longer_than(self, limit: int) -> tuple[int, int]:
        """Return how many numbers exceed `limit`, and their sum."""
        first = int(np.searchsorted(self.values, limit, "right"))
        return int(self.counts[first:].sum()), int((self.values[first:] * self.counts[first:]).sum())

    def log2_bins(self) -> list[Bin]:
        """Return bins [2^k, 2^(k+1)), from the smallest that holds a number to the largest; 0 has a bin of its own."""
        if not self.count:
            return []
        exponents = [int(value).bit_length() for value in (self.values[0], self.values[-1])]
        edges = [0 if exponent == 0 else 1 << (exponent - 1) for exponent in range(exponents[0], exponents[1] + 2)]
        places = np.searchsorted(self.values, edges)
        sums = self.values * self.counts
        return [
            Bin(low=low, high=high - 1, count=int(self.counts[start:stop].sum()), sum=int(sums[start:stop].sum()))
            for low, high, start, stop in zip(edges, edges[1:], places, places[1:], strict=False)
        ]
