"""What becomes of documents in windows and in packs: how many are cut, and how much is padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.words import counted


@dataclass(frozen=True, kw_only=True)
class CutCounts:
    """Cuts of documents.

    `cut_documents_that_fit` have at most context_len tokens; `tokens_behind_cuts` do not see where theirs begins.
    """

    num_cuts: int = 0
    cut_documents: int = 0
    cut_documents_that_fit: int = 0
    tokens_behind_cuts: int = 0

    def __add__(self, other: CutCounts) -> CutCounts:
        return CutCounts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    @classmethod
    def of(
        cls,
        firsts: NDArray[np.int64],
        stops: NDArray[np.int64],
        context_len: int,
        *,
        first_cut: NDArray[np.int64],
    ) -> CutCounts:
        """Count the cuts of documents `[first, stop)`: at `first_cut` of each, and every `context_len` behind it."""
        behind = np.maximum(stops - first_cut, 0)
        is_cut = behind > 0
        return cls(
            num_cuts=int((-(-behind // context_len)).sum()),
            cut_documents=int(np.count_nonzero(is_cut)),
            cut_documents_that_fit=int(np.count_nonzero(is_cut & (stops - firsts <= context_len))),
            tokens_behind_cuts=int(behind.sum()),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """A split cut into windows (from its first token on, as `epoch 0` may be) and into packs of one length."""

    context_len: int
    num_documents: int
    num_tokens: int
    num_packs: int
    windows: CutCounts
    packs: CutCounts

    @property
    def num_padding(self) -> int:
        """Tokens of padding in all packs; windows have none."""
        return self.num_packs * self.context_len - self.num_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the figures as manifest.json keeps them."""
        return {
            "num_documents": self.num_documents,
            "windows": {"num_samples": max(0, self.num_tokens - 1) // self.context_len, "num_padding": 0}
            | asdict(self.windows),
            "best_fit": {"num_samples": self.num_packs, "num_padding": self.num_padding} | asdict(self.packs),
        }


def report_lines(report: Mapping[str, Any], *, num_tokens: int, context_len: int) -> Iterator[str]:
    """Yield the lines of a comparison: a column for windows and one for packs."""
    num_documents = report["num_documents"]
    ways = [report["windows"], report["best_fit"]]

    def row(name: str, key: str, whole: int | None) -> tuple[str, ...]:
        return name, *(
            f"{way[key]:,}" + ("" if whole is None else f" ({100 * way[key] / max(1, whole):.3f}%)") for way in ways
        )

    yield f"{counted(num_documents, 'document')}, {counted(num_tokens, 'token')}, at {context_len:,} tokens a sample:"
    yield from _aligned(
        [
            ("", "windows", "best_fit"),
            row("samples", "num_samples", None),
            (
                "padding, in tokens",
                *(
                    f"{w['num_padding']:,} ({100 * w['num_padding'] / max(1, w['num_samples'] * context_len):.3f}%)"
                    for w in ways
                ),
            ),
            row("documents cut", "cut_documents", num_documents),
            row("… that would fit", "cut_documents_that_fit", num_documents),
            row("cuts", "num_cuts", None),
            row("tokens behind a cut", "tokens_behind_cuts", num_tokens),
        ]
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
