"""Which documents are too short or too long, in characters before they are tokenized and in tokens after."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import Documents


def by_characters(documents: Documents, min_chars: int | None, max_chars: int | None, rejects: Rejects) -> Documents:
    """Return the documents of at least `min_chars` and at most `max_chars` Unicode characters; the rest is counted."""
    if min_chars is None and max_chars is None:
        return documents
    characters = pc.utf8_length(documents.texts).to_numpy(zero_copy_only=False)
    short = np.zeros(len(documents), dtype=bool) if min_chars is None else characters < min_chars
    long = np.zeros(len(documents), dtype=bool) if max_chars is None else characters > max_chars
    rejects.count("too_short", int(np.count_nonzero(short)))
    rejects.count("too_long", int(np.count_nonzero(long)))
    return keep_documents(documents, ~(short | long))


def keep_documents(documents: Documents, keep: NDArray[np.bool_]) -> Documents:
    """Return those documents that `keep` marks."""
    if keep.all():
        return documents
    mask = pa.array(keep)
    return dataclasses.replace(
        documents,
        texts=documents.texts.filter(mask),
        rows=documents.rows[keep],
        num_bytes=documents.num_bytes[keep],
        kept=None if documents.kept is None else documents.kept.filter(mask),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Documents some of which were cut: `origin` is the document that each comes from, `part` its place in that one."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    origin: NDArray[np.int64]
    part: NDArray[np.int64]

    def share(self, num_bytes: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of text of each: those of the document it comes from, dealt by ids; `lengths` are theirs."""
        first = np.flatnonzero(self.part == 0)
        before = np.cumsum(self.lengths) - self.lengths
        before -= np.repeat(before[first], np.diff(first, append=len(self.part)))
        whole, sizes = lengths[self.origin], num_bytes[self.origin]
        return (before + self.lengths) * sizes // whole - before * sizes // whole


def cut_long(
    ids: NDArray[np.uint32], lengths: NDArray[np.int64], long: NDArray[np.bool_], most: int, *, policy: str
) -> Cut:
    """Deal with the documents that `long` marks: leave them out (skip), keep their first `most` ids, or cut them up.

    `lengths` sum to `len(ids)`. Cost: as the ids.
    """
    assert policy in ("skip", "truncate", "split")
    if policy == "split":
        counts = np.where(long, -(-lengths // most), 1)
        origin = np.repeat(np.arange(len(lengths)), counts)
        part = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
        cut = np.where(long[origin], np.minimum(lengths[origin] - part * most, most), lengths[origin])
        return Cut(ids=ids, lengths=cut, origin=origin, part=part)
    left = np.where(long, 0 if policy == "skip" else most, lengths)
    places = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    origin = np.flatnonzero(left > 0)
    return Cut(
        ids=ids[places < np.repeat(left, lengths)],
        lengths=left[origin],
        origin=origin,
        part=np.zeros(len(origin), dtype=np.int64),
    )
