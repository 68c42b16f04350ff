"""From windows to what the model sees: ids, labels, positions, and where each sequence begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flame.sampling.geometry import BatchGeometry
from flame.sampling.sampler import Sampler
from flame.shards.packed import PackedSplit
from flame.shards.reader import Split

IGNORE_INDEX = -100
_LONG_WINDOW = 32_768  # from this length on a copy each of ids and labels is the fastest

# Returns memory for so many values, contiguous, which nobody else uses while the batch is in use.
Memory = Callable[[int], NDArray[np.int32]]
# What `Split.view_window` returns of a window: its tokens, the document ends in it, and what those are counted from.
View = tuple[NDArray[np.uint32], NDArray[np.uint64], int]


class PackedBatch(NamedTuple):  # made in a quarter of a frozen dataclass's time, a few % of a whole step's
    """One micro-batch of one rank.

    `input_ids`, `labels` and `positions` are int32 `[rows, T]`. With varlen rows is 1 and T is B·seq_len, and
    `cu_seqlens` (int32 `[num_sequences + 1]`, 0 first, T last, strictly rising) delimits sequences, the longest of
    which has `max_seqlen` tokens; without it both are None. `labels_by_sample` tells how many labels each window has,
    `sources` and `samples` name each window's source, k.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32] | None
    max_seqlen: int | None
    labels_by_sample: tuple[int, ...]
    sources: NDArray[np.int32]
    samples: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence; of each row, without varlen."""
        if self.cu_seqlens is None:
            rows, length = self.input_ids.shape
            return np.full(rows, length, dtype=np.int32)
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def num_labels(self) -> int:
        return sum(self.labels_by_sample)

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
    context_len tokens within those. Without it every position has a label. What a model reads is written into
    `memory`, which is asked once for ids, labels and positions together, and once for cu_seqlens; without it, into
    memory of the batch's own.
    """
    N, S = len(windows), geometry.window_len
    T = N * S
    views = [split.view_window(offset, S) for split, offset in windows]
    out = np.empty(2 * T, dtype=np.int32) if memory is None else memory(3 * T)
    ids, labels = out[:T], out[T : 2 * T]
    _lay_tokens(views, S, ids.view(np.uint32), labels.view(np.uint32))
    if not geometry.varlen:
        positions = np.tile(_counting(S), N)
        return PackedBatch(
            input_ids=ids.reshape(N, S),
            labels=labels.reshape(N, S),
            positions=_placed(positions, None if memory is None else out[2 * T :]).reshape(N, S),
            cu_seqlens=None,
            max_seqlen=None,
            labels_by_sample=(S,) * N,
            sources=sources,
            samples=samples,
        )
    try:
        cuts, lengths = cut_sequences(views, S, geometry.context_len, labels.data)
    except (ValueError, IndexError):
        for split, offset in windows:
            if not isinstance(split, PackedSplit):
                split.ends_between(offset, offset + S)  # raises for the damaged one, with the file's name
        raise
    labels_by_sample = [S - len(ends) for _, ends, _ in views]
    for window, (split, offset) in enumerate(windows):
        if isinstance(split, PackedSplit) and (num_padding := split.num_padding(offset)):
            labels[(window + 1) * S - num_padding : (window + 1) * S] = IGNORE_INDEX
            labels_by_sample[window] -= num_padding - 1  # its last token counts as a sequence's
    cu_seqlens = np.array(cuts, dtype=np.int32)
    return PackedBatch(
        input_ids=ids.reshape(1, T),
        labels=labels.reshape(1, T),
        positions=_placed(_positions(lengths, S), None if memory is None else out[2 * T :]).reshape(1, T),
        cu_seqlens=_placed(cu_seqlens, None if memory is None else memory(len(cuts))),
        max_seqlen=max(lengths),
        labels_by_sample=tuple(labels_by_sample),
        sources=sources,
        samples=samples,
    )


def _lay_tokens(views: Sequence[View], window_len: int, ids: NDArray[np.uint32], labels: NDArray[np.uint32]) -> None:
    """Fill ids and labels, window by window; labels[i] is the token that follows ids[i].

    (Calls cost more than copies where windows are short. Numpy lets other threads run while it waits for a disk.)
    """
    if window_len >= _LONG_WINDOW:
        for begin, (tokens, _, _) in zip(range(0, len(ids), window_len), views, strict=True):
            ids[begin : begin + window_len] = tokens[:-1]
            labels[begin : begin + window_len] = tokens[1:]
        return
    np.concatenate([tokens[:-1] for tokens, _, _ in views], out=ids)
    labels[:-1] = ids[1:]
    labels[window_len - 1 :: window_len] = [tokens.item(-1) for tokens, _, _ in views]


def _placed(values: NDArray[np.int32], place: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Return `values`, copied to `place` if there is one."""
    if place is None:
        return values
    place[:] = values
    return place


def cut_sequences(
    views: Sequence[View], window_len: int, context_len: int, labels: memoryview[int]
) -> tuple[list[int], list[int]]:
    """Return cu_seqlens, cut at windows, at document ends, and every `context_len` tokens between; and their lengths.

    `views` are what `view_window` returns of each window; what is returned is in tokens of all windows laid one behind
    the other, as `labels` are, of which each document's last becomes `IGNORE_INDEX`. Raises `ValueError` or
    `IndexError` where ends do not rise. One loop in Python for all of it: sequences are hundreds of tokens long, and
    the dozen steps in numpy that do the same cost as much as a hundred turns of it.
    """
    cuts, lengths = [0], []
    before = begin = 0
    for _, ends, base in views:
        shift = begin - base
        for end in ends.tolist():
            stop = shift + end
            length = stop - before
            if length <= 0:
                raise ValueError("document ends fall")
            labels[stop - 1] = IGNORE_INDEX
            while length > context_len:
                before += context_len
                length -= context_len
                cuts.append(before)
                lengths.append(context_len)
            cuts.append(stop)
            lengths.append(length)
            before = stop
        begin += window_len
        length = begin - before
        while length > context_len:
            before += context_len
            length -= context_len
            cuts.append(before)
            lengths.append(context_len)
        if length:  # a document and its window may end together
            cuts.append(begin)
            lengths.append(length)
            before = begin
    return cuts, lengths


def _positions(lengths: Sequence[int], window_len: int) -> NDArray[np.int32]:
    """Return 0, 1, 2 … of each of consecutive sequences, `[T]`; none is longer than `window_len`.

    (A slice kept for each length costs more than a new one: the copies of tokens have driven it out of the cache.)
    """
    counts = _counting(window_len).data
    joined = bytearray().join([counts[:length] for length in lengths])
    return np.frombuffer(joined, dtype=np.int32)


@lru_cache(maxsize=64)
def _counting(length: int) -> NDArray[np.int32]:
    """Return 0, 1, 2 …, to be read only."""
    numbers = np.arange(length, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers
