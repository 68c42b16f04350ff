"""From windows to what the model sees: ids, labels, positions, and where each sequence begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flame.sampling.sampler import BatchGeometry, Sampler
from flame.shards.reader import Split

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch of one rank.

    `input_ids`, `labels` and `positions` are int32 `[rows, T]`. With varlen rows is 1 and T is B·seq_len, and
    `cu_seqlens` (int32 `[num_sequences + 1]`, 0 first, T last, strictly rising) delimits sequences, the longest of
    which has `max_seqlen` tokens; without it both are None. `lengths` are those of all sequences (rows, without
    varlen). `sources` and `samples` name each window's source and k.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32] | None
    max_seqlen: int | None
    lengths: NDArray[np.int32]
    num_labels: int
    sources: NDArray[np.int32]
    samples: NDArray[np.int64]

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
) -> PackedBatch:
    """Return the micro-batch of these windows, each a split and its first token; rows follow one another.

    With varlen a document's last token has no label, and sequences begin at each window, each document in it, and every
    context_len tokens within those. Without it every position has a label.
    """
    N, S = len(windows), geometry.window_len
    out_2NS = np.empty((2, N, S), dtype=np.int32)
    ends = _read(windows, S, *out_2NS.view(np.uint32))
    ids_NS, labels_NS = out_2NS
    if not geometry.varlen:
        return PackedBatch(
            input_ids=ids_NS,
            labels=labels_NS,
            positions=np.tile(_counting(S), (N, 1)),
            cu_seqlens=None,
            max_seqlen=None,
            lengths=np.full(N, S, dtype=np.int32),
            num_labels=N * S,
            sources=sources,
            samples=samples,
        )
    ids, labels = out_2NS.reshape(2, 1, N * S)
    try:
        cuts, stops = cut_sequences(ends, S, geometry.context_len)
    except ValueError:
        for split, offset in windows:
            split.ends_between(offset, offset + S)  # raises for the damaged one, with the file's name
        raise
    labels[0, np.array(stops, dtype=np.int64) - 1] = IGNORE_INDEX
    cu_seqlens = np.array(cuts, dtype=np.int32)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    each_length = lengths.tolist()
    return PackedBatch(
        input_ids=ids,
        labels=labels,
        positions=_positions(each_length, N * S),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(each_length),
        lengths=lengths,
        num_labels=N * S - len(stops),
        sources=sources,
        samples=samples,
    )


def _read(
    windows: Sequence[tuple[Split, int]], window_len: int, ids_NS: NDArray[np.uint32], labels_NS: NDArray[np.uint32]
) -> list[tuple[int, list[int]]]:
    """Fill ids and labels; return of each window a base, and the document ends in it, counted from that base.

    Ids are copied from labels, which the cache still holds, and not from the map again.
    """
    found, first_tokens = [], []
    for (split, offset), labels_S in zip(windows, labels_NS, strict=True):
        tokens, ends, base = split.view_window(offset, window_len)
        labels_S[:] = tokens[1:]
        first_tokens.append(tokens[0])
        found.append((base, ends.tolist()))
    ids_NS[:, 0] = first_tokens
    ids_NS[:, 1:] = labels_NS[:, :-1]
    return found


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


def _positions(lengths: Sequence[int], total: int) -> NDArray[np.int32]:
    """Return 0, 1, 2 … of each of consecutive sequences, `[1, total]`."""
    joined = bytearray().join(map(_COUNTS.__getitem__, lengths))
    return np.frombuffer(joined, dtype=np.int32).reshape(1, total)


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
