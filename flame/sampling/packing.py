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
_TOKENS_A_SLICE = 400  # are counted in the time that one more slice takes


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch of one rank.

    `input_ids`, `labels` and `positions` are int32 `[rows, T]`. With varlen rows is 1 and T is B·seq_len, and
    `cu_seqlens` (int32 `[num_sequences + 1]`, 0 first, T last, strictly rising) delimits sequences, the longest of
    which has `max_seqlen` tokens; without it both are None. `max_token_id` is the largest id that was read, for ids and
    labels alike. `sources` and `samples` name each window's source and k.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32] | None
    max_seqlen: int | None
    lengths: NDArray[np.int32]
    num_labels: int
    max_token_id: int
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
    N, S = len(windows), geometry.window_len
    ids_NS, labels_NS = np.empty((2, N, S), dtype=np.int32)
    ends = _read(windows, ids_NS.view(np.uint32), labels_NS.view(np.uint32))
    # unsigned, as they are on disk: an id above 2^31 is no negative one
    max_token_id = max(int(labels_NS.view(np.uint32).max()), int(ids_NS[:, 0].view(np.uint32).max()))
    if not geometry.varlen:
        return PackedBatch(
            input_ids=ids_NS,
            labels=labels_NS,
            positions=np.tile(_counting(S), (N, 1)),
            cu_seqlens=None,
            max_seqlen=None,
            lengths=np.full(N, S, dtype=np.int32),
            num_labels=N * S,
            max_token_id=max_token_id,
            sources=sources,
            samples=samples,
        )
    labels = labels_NS.reshape(1, -1)
    labels[0, ends - 1] = IGNORE_INDEX
    cu_seqlens = cut_sequences(ends, N, S, geometry.context_len)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return PackedBatch(
        input_ids=ids_NS.reshape(1, -1),
        labels=labels,
        positions=_positions(lengths, N * S).reshape(1, -1),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
        lengths=lengths,
        num_labels=N * S - len(ends),
        max_token_id=max_token_id,
        sources=sources,
        samples=samples,
    )


def _read(
    windows: Sequence[tuple[Split, int]], ids_NS: NDArray[np.uint32], labels_NS: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Fill ids and labels; return where documents end, in tokens of the windows laid one behind the other, rising."""
    S = ids_NS.shape[1]
    found: list[NDArray[np.uint64]] = []
    shifts: list[int] = []
    for (split, offset), ids_S, labels_S in zip(windows, ids_NS, labels_NS, strict=True):
        tokens, ends, base = split.view_window(offset, S)
        ids_S[:] = tokens[:-1]
        labels_S[:] = tokens[1:]
        shifts.append(len(found) * S - base)
        found.append(ends)
    stops = np.concatenate(found).view(np.int64)
    stops += shifts[0] if len(found) == 1 else np.repeat(shifts, [len(ends) for ends in found])
    if np.count_nonzero(stops[1:] > stops[:-1]) < len(stops) - 1:
        for split, offset in windows:
            split.ends_between(offset, offset + S)  # raises for the damaged one
        raise AssertionError("document ends of a window fall, and were not found to")
    return stops


def cut_sequences(
    document_ends: NDArray[np.int64], num_windows: int, window_len: int, context_len: int
) -> NDArray[np.int32]:
    """Return cu_seqlens (int32): cuts at windows, at document ends, and every `context_len` tokens between those.

    `document_ends` are exclusive, in tokens of `num_windows` windows laid one behind the other.
    """
    total = num_windows * window_len
    stops = np.concatenate((document_ends, np.arange(window_len, total + 1, window_len)))
    stops.sort()
    starts = np.empty_like(stops)
    starts[0] = 0
    starts[1:] = stops[:-1]
    pieces = stops - starts  # 0 tokens where a document and a window end together: no piece
    pieces += context_len - 1
    pieces //= context_len
    first_piece = pieces.cumsum()
    num_sequences = int(first_piece[-1])
    first_piece -= pieces
    starts -= first_piece * context_len  # where a piece 0 would begin, that piece p begins p · context_len after it
    cu_seqlens = np.empty(num_sequences + 1, dtype=np.int32)
    cu_seqlens[:-1] = np.repeat(starts, pieces) + np.arange(0, num_sequences * context_len, context_len)
    cu_seqlens[-1] = total
    return cu_seqlens


def _positions(lengths: NDArray[np.int32], total: int) -> NDArray[np.int32]:
    """Return 0, 1, 2 … of each of consecutive sequences."""
    numbers = _counting(total)
    if len(lengths) * _TOKENS_A_SLICE > total:
        starts = lengths.cumsum(dtype=np.int32) - lengths
        return np.subtract(numbers, np.repeat(starts, lengths), dtype=np.int32)
    numbers_bytes = numbers.data.cast("B")  # the first few pages of it stay in the cache
    pieces = [numbers_bytes[:size_bytes] for size_bytes in (lengths * numbers.itemsize).tolist()]
    return np.frombuffer(bytearray().join(pieces), dtype=np.int32)


@lru_cache(maxsize=4)
def _counting(length: int) -> NDArray[np.int32]:
    """Return 0, 1, 2 …, to be read only."""
    numbers = np.arange(length, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers
