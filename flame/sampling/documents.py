"""Which documents of a split are asked for: by number, or by where they came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.sampling.trace import OPEN
from flame.shards.format import docs_path
from flame.shards.reader import Split

_DOCUMENTS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class WantedDocuments:
    """What all must hold of a document: one of the numbers, one of the rows, the file, and every column's pattern.

    Nothing given of a kind holds for all. `source_file` is a file's whole name as docs.parquet has it, or what follows
    a slash in it; a pattern is looked for anywhere in a value, which is text or is written as JSON writes it (null has
    none).
    """

    numbers: Sequence[range] = ()
    columns: Sequence[tuple[str, re.Pattern[str]]] = ()
    source_file: str | None = None
    rows: Sequence[range] = ()

    @property
    def by_origin(self) -> bool:
        """Whether docs.parquet must be looked through."""
        return bool(self.columns or self.rows) or self.source_file is not None

    def find(self, split: Split) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of the documents of a split that are wanted, rising, some thousands at a time.

        Cost: nothing a document that is not wanted where numbers alone say it; else docs.parquet is read, a row group
        at a time, of the shards that hold any of the numbers. Raises `CorpusError` for numbers beyond the last, and
        where provenance or a column is absent.
        """
        for asked in self.numbers:
            split.document_bounds(asked.start if asked.stop == OPEN else asked.stop - 1)
        stretches = _merged(self.numbers or [range(split.num_documents)], split.num_documents)
        if self.by_origin:
            yield from self._find_by_origin(split, stretches)
            return
        for stretch in stretches:
            for first in range(stretch.start, stretch.stop, _DOCUMENTS_AT_ONCE):
                yield np.arange(first, min(first + _DOCUMENTS_AT_ONCE, stretch.stop))

    def _find_by_origin(self, split: Split, stretches: Sequence[range]) -> Iterator[NDArray[np.int64]]:
        from flame.shards.provenance import scan_columns  # pyarrow: -h needs none

        names = dict.fromkeys([name for name, _ in self.columns])
        names |= dict.fromkeys(["row"] if self.rows else [])
        names |= dict.fromkeys(["source_file"] if self.source_file is not None else [])
        starts = accumulate((shard.num_documents for shard in split.shards), initial=0)
        for start, shard in zip(starts, split.shards, strict=False):
            own = [_within(stretch, start, start + shard.num_documents) for stretch in stretches]
            if not any(own):
                continue
            path = docs_path(split.corpus.path, split.name, shard.name)
            for first, values in scan_columns(path, list(names), num_documents=shard.num_documents):
                held = np.flatnonzero(self._holds(values)) + start + first
                held = held[_in_any(held, own)]
                for piece in range(0, len(held), _DOCUMENTS_AT_ONCE):
                    yield held[piece : piece + _DOCUMENTS_AT_ONCE]

    def _holds(self, values: dict[str, list[Any]]) -> NDArray[np.bool_]:
        """Return whether each row of a row group has what is asked of its columns."""
        holds = np.ones(len(next(iter(values.values()))), dtype=np.bool_)
        for name, pattern in self.columns:
            holds &= [value is not None and bool(pattern.search(_as_text(value))) for value in values[name]]
        if self.rows:
            holds &= [any(row in asked for asked in self.rows) for row in values["row"]]
        if self.source_file is not None:
            whole, end = self.source_file, "/" + self.source_file.lstrip("/")
            holds &= [name == whole or (name or "").endswith(end) for name in values["source_file"]]
        return holds


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _merged(stretches: Sequence[range], stop: int) -> list[range]:
    """Return the stretches in order and apart from one another, none beyond `stop`."""
    merged: list[range] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        first = max(stretch.start, merged[-1].stop if merged else 0)
        if first < min(stretch.stop, stop):
            merged.append(range(first, min(stretch.stop, stop)))
    return merged


def _within(stretch: range, start: int, stop: int) -> range:
    return range(max(stretch.start, start), max(min(stretch.stop, stop), max(stretch.start, start)))


def _in_any(numbers: NDArray[np.int64], stretches: Sequence[range]) -> NDArray[np.bool_]:
    inside = np.zeros(len(numbers), dtype=np.bool_)
    for stretch in stretches:
        inside |= (numbers >= stretch.start) & (numbers < stretch.stop)
    return inside
