"""Which samples hold tokens of a document: from token to window to sample, back through the sampler's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flame.sampling.sampler import Sampler
from flame.shards.packed import PackedSplit, Pieces
from flame.shards.reader import Split


@dataclass(frozen=True)
class Occurrences:
    """Windows that hold tokens of documents: arrays of one length, by document and then in the order of the run.

    `start` is the part's first token in the window, `num_tokens` how many there are, as in what trace tells.
    """

    document: NDArray[np.int64]
    k: NDArray[np.int64]
    epoch: NDArray[np.int64]
    window: NDArray[np.int64]
    start: NDArray[np.int64]
    num_tokens: NDArray[np.int64]

    def rows(self) -> Iterator[dict[str, int]]:
        """Yield each occurrence as an object."""
        names = tuple(Occurrences.__dataclass_fields__)
        for values in zip(*(getattr(self, name).tolist() for name in names), strict=True):
            yield dict(zip(names, values, strict=True))


def epochs_of(sampler: Sampler, source: int, samples: range) -> range:
    """Return the epochs of a source that these samples draw from. Cost: some milliseconds."""
    before, after = (int(sampler.counts(k)[source]) for k in (samples.start, samples.stop))
    num_windows = sampler.num_windows[source]
    return range(before // num_windows, -(-after // num_windows)) if after > before else range(0)


def occurrences(
    sampler: Sampler, split: Split, source: int, documents: NDArray[np.int64], epochs: range, limit: range
) -> Occurrences:
    """Return the samples in `limit`, which draw from these epochs of a source, that hold tokens of these documents.

    In each epoch a document's tokens lie in windows that follow from the epoch's offset; each window's sample follows
    from the inverses of the epoch's order and of the mixture's table. Cost: a few milliseconds an epoch, and what is
    found; the same for any length of the run.
    """
    packed = split.find_pieces(documents) if isinstance(split, PackedSplit) else None  # the same in every epoch
    bounds = np.array([split.document_bounds(int(document)) for document in documents], dtype=np.int64).reshape(-1, 2)
    found: list[tuple[NDArray[np.int64], ...]] = []
    for epoch in epochs:
        parts = _parts_of(bounds, sampler, source, epoch) if packed is None else packed
        ks = sampler.find_windows(source, epoch, parts.window)
        inside = np.flatnonzero((ks >= limit.start) & (ks < limit.stop))
        own = (parts.window, parts.start, parts.num_tokens)
        found.append(
            (
                documents[parts.which[inside]],
                ks[inside],
                np.full(len(inside), epoch),
                *(column[inside] for column in own),
            )
        )
    if not found:
        return Occurrences(*(np.empty(0, dtype=np.int64) for _ in range(6)))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return Occurrences(*(column[order] for column in columns))


def _parts_of(bounds: NDArray[np.int64], sampler: Sampler, source: int, epoch: int) -> Pieces:
    """Return the parts of documents, `[first, stop)` in tokens of the split each, in the windows of one epoch."""
    num_windows, window_len = sampler.num_windows[source], sampler.window_len
    first, stop = (bounds - sampler.first_token(source, epoch)).T
    first_window = np.maximum(first // window_len, 0)
    counts = np.maximum(np.minimum((stop - 1) // window_len, num_windows - 1) - first_window + 1, 0)
    which = np.repeat(np.arange(len(bounds)), counts)
    windows = first_window[which] + np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
    start = np.maximum(first[which] - windows * window_len, 0)
    num_tokens = np.minimum(stop[which] - windows * window_len, window_len) - start
    return Pieces(which=which, window=windows, start=start, num_tokens=num_tokens)
