"""What a task tells while it runs: what it has done, and which documents the tokenizer has at the moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InHand:
    """Which documents the tokenizer has at the moment; `row` as docs.parquet counts."""

    path: str
    noun: str
    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.path}, {self.noun} {self.first}"
        return f"{self.path}, {self.noun}s {self.first} to {self.last}"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What has been done since the last report (less than nothing where it is done again); `note` is for people.

    `num_refused` and, of these, `num_errors` (malformed input) come when a task ends. `in_hand` is what the tokenizer
    begins with; None if it has nothing.
    """

    input_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    num_errors: int = 0
    note: str | None = None
    in_hand: InHand | None = None

    def __add__(self, other: Progress) -> Progress:
        return Progress(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})

    def taken_back(self, note: str) -> Progress:
        """Return the report that undoes this one."""
        return Progress(**{name: -getattr(self, name) for name in _COUNTS}, note=note)


_COUNTS = ("input_bytes", "num_documents", "num_tokens", "num_refused", "num_errors")
