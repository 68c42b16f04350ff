"""From windows to what the model sees: ids, labels, positions, and where each sequence begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flame.sampling.sampler import BatchGeometry, Sampler
from flame.shards.packed import PackedSplit
from flame.shards.reader import Split

IGNORE_INDEX = -100

Memory = Callable[[int], NDArray[np.int32]]
"""Returns memory for so many values, contiguous, which nobody else uses while the batch is in use."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch of one rank.

    `input_ids`, `labels` and `positions` are int32 `[rows, T]`. With varlen rows is 1 and T is B·seq_len, and
    `cu_seqlens` (int32 `[num_sequences + 1]`, 0 first, T last, strictly rising) delimits sequences, the longest of
    which has `max_seqlen` tokens; without it both are None. `lengths` are those of all sequences (rows, without
    varlen), `labels_by_sample` how many labels each window has. `sources` and `samples` name each window's source, k.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32] | None
    max_seqlen: int | None
    lengths: NDArray[np.int32]
    labels_by_sample: NDArray[np.int64]
    sources: NDArray[np.int32]
    samples: NDArray[np.int64]

    @property
    def num_labels(self) -> int:
        return int(self.labels_by_sample.sum())

    @property
    def max_token_id(self) -> int:
        """The largest token id, of ids and labels alike. Cost: a pass over the ids."""
        last_labels = self.labels.reshape(len(self.samples), -1)[:, -1]  # the others are ids, too
        last_labels = last_labels[last_labels != IGNORE_INDEX]
        # unsigned, as they are on disk: an id above 2^31 is no negative one
        return max(int(ids.view(np.uint32).max(initial=0)) for ids in (self.input_ids, last_labels))


def pack(sampler: Sampler, splits: Sequence[Split], ks: NDArray[np.int64], geometry: BatchGeometry) -> PackedBatch:
    """Return the micro-batch of the samples `ks`, `[micro_batch, windows_per_row]`. Reads each token once."""
    samples = ks.reshape(-1)
    located = sampler.locate(samples)
    windows = [(splits[source], offset) for source, offset in zip(located.source, located.offset.tolist(), strict=True)]
    return pack_windows(windows, geometry, sources=located.source, samples=samples)


def pack_windows(
    windows: Sequence[tuple[Split, int]],
    geometry: BatchGeometry,
    *,
    sources: NDArray[np.int32],
    samples: NDArray[np.int64],
    memory: Memory | None = None,
) -> PackedBatch:
    """Return the micro-batch of these windows, each a split and its first token; rows follow one another.

    With varlen a document's last token has no label, and sequences begin at each window, each document in it, and every
    context_len tokens within those. Without it every position has a label. What a model reads is written into one piece
    of `memory`, in its fields' order; without it, into memory of the batch's own.
    """
    N, S = len(windows), geometry.window_len
    views = [split.view_window(offset, S) for split, offset in windows]
    if not geometry.varlen:
        out = np.empty(3 * N * S, dtype=np.int32) if memory is None else memory(3 * N * S)
        ids, labels, positions = out.reshape(3, N, S)
        _copy_tokens(views, ids, labels)
        positions[:] = _counting(S)
        return PackedBatch(
            input_ids=ids,
            labels=labels,
            positions=positions,
            cu_seqlens=None,
            max_seqlen=None,
            lengths=np.full(N, S, dtype=np.int32),
            labels_by_sample=np.full(N, S, dtype=np.int64),
            sources=sources,
            samples=samples,
        )
    ends = [(base, window_ends.tolist()) for _, window_ends, base in views]
    try:
        cuts, stops = cut_sequences(ends, S, geometry.context_len)
    except ValueError:
        for split, offset in windows:
            if not isinstance(split, PackedSplit):
                split.ends_between(offset, offset + S)  # raises for the damaged one, with the file's name
        raise
    T = N * S
    cu_seqlens = np.array(cuts, dtype=np.int32)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    each_length = lengths.tolist()
    if memory is None:
        ids, labels = np.empty((2, 1, T), dtype=np.int32)
        positions = _positions(each_length)
    else:
        out = memory(3 * T + len(cuts))
        ids, labels, positions = out[: 3 * T].reshape(3, 1, T)
        positions[:] = _positions(each_length)
        out[3 * T :] = cu_seqlens
        cu_seqlens = out[3 * T :]
    _copy_tokens(views, ids.reshape(N, S), labels.reshape(N, S))
    unlabelled = labels.data.cast("B").cast("i")
    for stop in stops:
        unlabelled[stop - 1] = IGNORE_INDEX
    labels_by_sample = np.array([S - len(window_ends) for _, window_ends in ends], dtype=np.int64)
    for window, (split, offset) in enumerate(windows):
        if isinstance(split, PackedSplit) and (num_padding := split.num_padding(offset)):
            labels[0, (window + 1) * S - num_padding : (window + 1) * S] = IGNORE_INDEX
            labels_by_sample[window] -= num_padding - 1  # its last token counts as a sequence's
    return PackedBatch(
        input_ids=ids,
        labels=labels,
        positions=positions,
        cu_seqlens=cu_seqlens,
        max_seqlen=max(each_length),
        lengths=lengths,
        labels_by_sample=labels_by_sample,
        sources=sources,
        samples=samples,
    )


def _copy_tokens(
    views: Sequence[tuple[NDArray[np.uint32], NDArray[np.uint64], int]],
    ids_NS: NDArray[np.int32],
    labels_NS: NDArray[np.int32],
) -> None:
    """Fill ids and labels, both from the map: its tokens are in the cache for the second.

    (One from the other costs more: reads four bytes behind writes make the processor wait.)
    """
    for (tokens, _, _), ids_S, labels_S in zip(views, ids_NS.view(np.uint32), labels_NS.view(np.uint32), strict=True):
        ids_S[:] = tokens[:-1]
        labels_S[:] = tokens[1:]


def cut_sequences(
    document_ends: Sequence[tuple[int, Sequence[int]]], window_len: int, context_len: int
) -> tuple[list[int], list[int]]:
    """Return cu_seqlens, cut at windows, at document ends, and every `context_len` tokens between; and documents' ends.

    `document_ends` are a base and the ends counted from it, of each window; what is returned is in tokens of all
    windows laid one behind the other. Raises `ValueError` unless they rise. A loop in Python: sequences are hundreds of
    tokens long, and the dozen steps in numpy that do the same cost as much as a hundred turns of it.
    """
    cuts, stops = [0], []
    before = begin = 0
    for base, ends in document_ends:
        shift = begin - base
        for end in ends:
            stop = shift + end
            if stop <= before:
                raise ValueError("document ends fall")
            stops.append(stop)
            while stop - before > context_len:
                before += context_len
                cuts.append(before)
            cuts.append(stop)
            before = stop
        begin += window_len
        while begin - before > context_len:
            before += context_len
            cuts.append(before)
        if before < begin:  # a document and its window may end together
            cuts.append(begin)
            before = begin
    return cuts, stops


def _positions(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return 0, 1, 2 … of each of consecutive sequences, `[1, T]`."""
    joined = bytearray().join(map(_COUNTS.__getitem__, lengths))
    return np.frombuffer(joined, dtype=np.int32).reshape(1, -1)


class _Counts(dict[int, memoryview]):
    """0, 1, 2 … of every length that was asked for: slices of one array, whose first pages stay in the cache.

    At most as many as there are lengths of sequences, 200 bytes each.
    """

    def __missing__(self, length: int) -> memoryview:
        least_bits = 16  # so that all the usual ones are slices of one array
        found = self[length] = _counting(1 << max(least_bits, length.bit_length())).data[:length]
        return found


_COUNTS = _Counts()


@lru_cache(maxsize=64)
def _counting(length: int) -> NDArray[np.int32]:
    """Return 0, 1, 2 …, to be read only."""
    numbers = np.arange(length, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers
