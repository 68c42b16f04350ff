"""From windows to what the model sees: ids, labels, positions, and where each sequence begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    which has `max_seqlen` tokens; without it both are None. `sources` and `samples` name each window's source and k.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32] | None
    max_seqlen: int | None
    num_labels: int
    sources: NDArray[np.int32]
    samples: NDArray[np.int64]


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
    S = geometry.window_len
    ids_NS = np.empty((len(windows), S), dtype=np.int32)
    labels_NS = np.empty((len(windows), S), dtype=np.int32)
    for i, (split, offset) in enumerate(windows):
        split.read_into(offset, ids_NS[i])
        labels_NS[i, :-1] = ids_NS[i, 1:]
        split.read_into(offset + S, labels_NS[i, -1:])
    if not geometry.varlen:
        return PackedBatch(
            input_ids=ids_NS,
            labels=labels_NS,
            positions=np.broadcast_to(np.arange(S, dtype=np.int32), ids_NS.shape).copy(),
            cu_seqlens=None,
            max_seqlen=None,
            num_labels=labels_NS.size,
            sources=sources,
            samples=samples,
        )
    ends = _document_ends(windows, S)
    labels = labels_NS.reshape(1, -1)
    labels[0, ends - 1] = IGNORE_INDEX
    cu_seqlens = cut_sequences(ends, len(windows), S, geometry.context_len)
    lengths = np.diff(cu_seqlens)
    positions = np.arange(labels.size, dtype=np.int32)
    positions -= np.repeat(cu_seqlens[:-1], lengths)
    return PackedBatch(
        input_ids=ids_NS.reshape(1, -1),
        labels=labels,
        positions=positions.reshape(1, -1),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
        num_labels=labels.size - len(ends),
        sources=sources,
        samples=samples,
    )


def _document_ends(windows: Sequence[tuple[Split, int]], window_len: int) -> NDArray[np.int64]:
    """Return the exclusive ends of documents, in tokens of the windows laid one behind the other."""
    ends = []
    for i, (split, offset) in enumerate(windows):
        inside = split.ends_between(offset, offset + window_len)
        inside += i * window_len - offset
        ends.append(inside)
    return np.concatenate(ends)


def cut_sequences(
    document_ends: NDArray[np.int64], num_windows: int, window_len: int, context_len: int
) -> NDArray[np.int32]:
    """Return cu_seqlens (int32): cuts at windows, at document ends, and every `context_len` tokens between those.

    `document_ends` are exclusive, rising, in tokens of `num_windows` windows laid one behind the other.
    """
    windows = np.arange(1, num_windows + 1, dtype=np.int64) * window_len
    stops = np.union1d(document_ends, windows)
    starts = np.concatenate([[0], stops[:-1]])
    pieces = -(-(stops - starts) // context_len)
    if len(stops) and int(pieces.max()) > 1:
        first_piece = np.cumsum(pieces) - pieces
        within = np.arange(int(pieces.sum())) - np.repeat(first_piece, pieces)
        starts = np.repeat(starts, pieces) + within * context_len
    return np.append(starts, num_windows * window_len).astype(np.int32)
