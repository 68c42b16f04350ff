"""Which source each sample comes from: a closed form in 64-bit integers, the same for any number of ranks.

Weights become slots of a table of W = 2^22. Sources are paired as in a Huffman tree; from the root down each node deals
its slots to its two children as evenly as integers allow; then slots are permuted within blocks of 16. Every prefix of
the order is within 1 sample of its quota before that permutation, and within 5 after it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flame.errors import MixtureError
from flame.sampling.permutation import splitmix64

TABLE_SLOTS = 1 << 22
BLOCK_SLOTS = 16


def integer_weights(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers of slots, proportional to `weights`, that sum to `TABLE_SLOTS` (largest remainder).

    Weights need not sum to 1. A weight of 0 stays 0: its source is never drawn. Raises `MixtureError` for negative,
    infinite or undefined weights, none above 0, and one too small for a slot, naming the smallest usable one.
    """
    for name, weight in zip(names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise MixtureError(
                f"the weight of source {name!r} is no weight", got=weight, expected="a finite number of at least 0"
            )
    total = math.fsum(weights)
    if total <= 0 or not math.isfinite(total):
        raise MixtureError("no source has a weight above 0", got=", ".join(map(str, weights)))
    exact = [weight / total * TABLE_SLOTS for weight in weights]
    slots = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (slots[i] - exact[i], i))
    for i in by_remainder[: TABLE_SLOTS - sum(slots)]:
        slots[i] += 1
    for name, weight, count in zip(names, weights, slots, strict=True):
        if weight > 0 and count == 0:
            raise MixtureError(
                f"the weight of source {name!r} is too small to be drawn",
                got=weight,
                expected=f"at least {total / TABLE_SLOTS:.6g}, one part in {TABLE_SLOTS} of the sum of weights, or 0",
                fix="Raise it, or leave the source out",
            )
    return tuple(slots)


@dataclass(frozen=True)
class SlotTable:
    """The order of sources over `TABLE_SLOTS` samples, repeated for ever.

    `source[i]` (uint16) is slot i's source; `before[i]` (uint32) how many earlier slots are of the same source;
    `counts[s]` (int64) how many slots source s has in all.
    """

    source: NDArray[np.uint16]
    before: NDArray[np.uint32]
    counts: NDArray[np.int64]

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each sample index from 0, its source and how many earlier samples were of that source."""
        rounds, slot = np.divmod(index, TABLE_SLOTS)
        source = self.source[slot].astype(np.int64)
        return source, rounds * self.counts[source] + self.before[slot]

    def counts_before(self, index: int) -> NDArray[np.int64]:
        """Return how many of the first `index` samples come from each source."""
        rounds, slots = divmod(index, TABLE_SLOTS)
        drawn = np.bincount(self.source[:slots], minlength=len(self.counts)).astype(np.int64)
        return rounds * self.counts + drawn


def slot_table(slots: Sequence[int], data_seed: int) -> SlotTable:
    """Return the table for whole numbers of slots that sum to `TABLE_SLOTS`. Cost: under a second for 300 sources."""
    assert sum(slots) == TABLE_SLOTS and len(slots) <= 1 << 16, "integer_weights made these"
    order = _dealt(slots)
    source = _shuffled_in_blocks(order, data_seed)
    counts = np.asarray(slots, dtype=np.int64)
    return SlotTable(source=source, before=_running_counts(source, counts), counts=counts)


def _dealt(slots: Sequence[int]) -> NDArray[np.uint16]:
    """Return the source of every slot before the blocks are shuffled."""
    order = np.empty(TABLE_SLOTS, dtype=np.uint16)
    pending: list[tuple[_Node, NDArray[np.int64]]] = [(_huffman_tree(slots), np.arange(TABLE_SLOTS))]
    while pending:
        node, places = pending.pop()
        if node.source is not None:
            order[places] = node.source
            continue
        assert node.left is not None and node.right is not None, "an inner node has two children"
        c, left_count = node.count, node.left.count
        turns = (np.arange(c + 1, dtype=np.int64) * left_count + c // 2) // c
        to_left = turns[1:] > turns[:-1]
        pending += [(node.left, places[to_left]), (node.right, places[~to_left])]
    return order


@dataclass(frozen=True)
class _Node:
    count: int
    source: int | None = None
    left: _Node | None = None
    right: _Node | None = None


def _huffman_tree(slots: Sequence[int]) -> _Node:
    """Pair the two smallest again and again; ties go by position, and a pair stands behind all that was there."""
    heap = [(count, source, _Node(count, source=source)) for source, count in enumerate(slots) if count]
    heapq.heapify(heap)
    position = len(slots)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        heapq.heappush(heap, (left.count + right.count, position, _Node(left.count + right.count, None, left, right)))
        position += 1
    return heap[0][2]


def _shuffled_in_blocks(order: NDArray[np.uint16], data_seed: int) -> NDArray[np.uint16]:
    keys = splitmix64(np.arange(len(order), dtype=np.uint64) ^ splitmix64(np.array([data_seed % 2**64], np.uint64)))
    blocks = keys.reshape(-1, BLOCK_SLOTS)
    ranks = np.argsort(blocks, axis=1, kind="stable")
    return np.ascontiguousarray(np.take_along_axis(order.reshape(-1, BLOCK_SLOTS), ranks, axis=1)).reshape(-1)


def _running_counts(source: NDArray[np.uint16], counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    by_source = np.argsort(source, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    before = np.empty(len(source), dtype=np.uint32)
    before[by_source] = np.arange(len(source)) - np.repeat(starts, counts)
    return before
