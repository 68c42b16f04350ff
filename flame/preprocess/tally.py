"""Documents and tokens by name (a source file, a host), the names with most tokens kept in bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_NAMES = 1 << 20


@dataclass(kw_only=True)
class Tally:
    """Counts of (documents, tokens) by name. Beyond `MOST_NAMES` names the smaller half is forgotten.

    `missing_tokens` is the most that a count of tokens may then be too low by; 0: every count is exact.
    """

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_documents: int = 0
    missing_tokens: int = 0

    def add(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Take (name, documents, tokens)."""
        for name, num_documents, num_tokens in rows:
            before = self.counts.get(name, (0, 0))
            self.counts[name] = before[0] + num_documents, before[1] + num_tokens
            self.num_documents += num_documents
        if len(self.counts) > MOST_NAMES:
            ordered = sorted(self.counts.items(), key=lambda item: -item[1][1])
            self.missing_tokens += ordered[MOST_NAMES // 2][1][1]
            self.counts = dict(ordered[: MOST_NAMES // 2])

    def top(self, number: int) -> list[tuple[str, int, int]]:
        """Return (name, documents, tokens) of the names with most tokens, most first."""
        found = heapq.nsmallest(number, self.counts.items(), key=lambda item: (-item[1][1], item[0]))
        return [(name, *counts) for name, counts in found]
