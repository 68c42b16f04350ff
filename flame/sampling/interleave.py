"""Which source each sample comes from: a closed form in 64-bit integers, the same for any number of ranks.

Weights become slots of a table of W = 2^22. Sources are paired as in a Huffman tree; each pair deals its slots to its
two members as evenly as integers allow; then slots are permuted within blocks of 16. Before that permutation every
prefix of the order is within 1 sample of its quota (1.68 for weights that grow as Fibonacci's numbers), and after it
within 5.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from flame.errors import UsageError
from flame.sampling.permutation import splitmix64, splitmix64_scalar

TABLE_SLOTS = 1 << 22
BLOCK_SLOTS = 16
MAX_SOURCES = 1 << 16  # a slot's source is a uint16
_STRETCH_SLOTS = 1 << 16  # worked on at a time: what fits a core's cache


def integer_weights(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers of slots, proportional to `weights`, that sum to `TABLE_SLOTS` (largest remainder).

    Weights need not sum to 1: each counts as its share of the sum. A weight of 0 stays 0: its source is never drawn.
    Raises `UsageError` for negative, infinite or undefined weights, none above 0, and one too small for a slot, naming
    the smallest usable one.
    """
    for name, weight in zip(names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(
                f"the weight of source {name!r} is no weight", got=weight, expected="a finite number of at least 0"
            )
    total = sum(map(Fraction, weights))  # exact: floats are fractions
    if total == 0:
        raise UsageError("no source has a weight above 0", got=", ".join(map(str, weights)) or "no source at all")
    exact = [Fraction(weight) * TABLE_SLOTS / total for weight in weights]
    slots = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (slots[i] - exact[i], i))
    for i in by_remainder[: TABLE_SLOTS - sum(slots)]:
        slots[i] += 1
    for name, weight, count in zip(names, weights, slots, strict=True):
        if weight > 0 and count == 0:
            least = float((total - Fraction(weight)) / (TABLE_SLOTS - 1))
            raise UsageError(
                f"the weight of source {name!r} is too small: it would never be drawn",
                got=weight,
                expected=f"at least {_rounded_up(least)} beside the others (1 sample in {TABLE_SLOTS}), or 0",
                fix="Raise it, or leave the source out",
            )
    return tuple(slots)


def _rounded_up(value: float) -> str:
    """Return `value` with four digits, not below it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.ceil(value / unit) * unit:.4g}"


@dataclass(frozen=True)
class SlotTable:
    """The order of sources over `TABLE_SLOTS` samples, repeated for ever. Memory: 24 MiB.

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

    def index_of(self, source: int, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample index of each of a source's samples, which are numbered from 0: the inverse of `locate`.

        The source has a slot. Cost: one pass over the table a call (some milliseconds), then a look-up a number.
        """
        slots = np.flatnonzero(self.source == source)
        rounds, place = np.divmod(number, self.counts[source])
        return rounds * TABLE_SLOTS + slots[place]

    def counts_before(self, index: int) -> NDArray[np.int64]:
        """Return how many of the first `index` samples come from each source. Cost: some milliseconds."""
        rounds, slots = divmod(index, TABLE_SLOTS)
        counts = rounds * self.counts
        for start in range(0, slots, _STRETCH_SLOTS):
            counts += np.bincount(self.source[start : min(start + _STRETCH_SLOTS, slots)], minlength=len(counts))
        return counts


def slot_table(slots: Sequence[int], data_seed: int) -> SlotTable:
    """Return the table for whole numbers of slots that sum to `TABLE_SLOTS`. Cost: 0.1 to 0.5 s."""
    assert sum(slots) == TABLE_SLOTS and len(slots) <= MAX_SOURCES, "integer_weights made these"
    source = dealt_slots(slots)
    _shuffle_blocks(source, data_seed)
    counts = np.asarray(slots, dtype=np.int64)
    return SlotTable(source=source, before=_running_counts(source, len(slots)), counts=counts)


def dealt_slots(slots: Sequence[int]) -> NDArray[np.uint16]:
    """Return the source of every slot before blocks are permuted.

    The two sources with the fewest slots are paired again and again (ties go by position, and a pair stands behind all
    that was there); each pair is the order of its members' slots.
    """
    orders = [(count, i, np.full(count, i, dtype=np.uint16)) for i, count in enumerate(slots) if count]
    heapq.heapify(orders)
    position = len(slots)
    while len(orders) > 1:
        (left_count, _, left), (right_count, _, right) = heapq.heappop(orders), heapq.heappop(orders)
        heapq.heappush(orders, (left_count + right_count, position, _dealt(left, right)))
        position += 1
    return orders[0][2]


def _dealt(left: NDArray[np.uint16], right: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Interleave two orders: of c slots, the i-th is left's where ⌊((i+1)·l + ⌊c/2⌋)/c⌋ exceeds ⌊(i·l + ⌊c/2⌋)/c⌋.

    So left's t-th slot is the first i with (i+1)·l + ⌊c/2⌋ ≥ t·c.
    """
    l, c = len(left), len(left) + len(right)  # noqa: E741
    places = np.arange(1, l + 1, dtype=np.int64)
    places *= c
    places += l - 1 - c // 2
    places //= l
    places -= 1
    is_right = np.ones(c, dtype=np.bool_)
    is_right[places] = False
    order = np.empty(c, dtype=np.uint16)
    order[places] = left
    order[is_right] = right
    return order


def _shuffle_blocks(source: NDArray[np.uint16], data_seed: int) -> None:
    """Permute slots within blocks, in place: sorted by splitmix64 of their number and the seed, then by place."""
    place_bits = np.uint64(BLOCK_SLOTS - 1)
    seed = np.uint64(splitmix64_scalar(data_seed))
    for start in range(0, len(source), _STRETCH_SLOTS):
        slots = np.arange(start, start + _STRETCH_SLOTS, dtype=np.uint64)
        keys = (splitmix64(slots ^ seed) & ~place_bits) | (slots & place_bits)
        keys = np.sort(keys.reshape(-1, BLOCK_SLOTS), axis=1)
        blocks = source[start : start + _STRETCH_SLOTS].reshape(-1, BLOCK_SLOTS)
        blocks[:] = np.take_along_axis(blocks, (keys & place_bits).astype(np.int64), axis=1)


def _running_counts(source: NDArray[np.uint16], num_sources: int) -> NDArray[np.uint32]:
    before = np.empty(len(source), dtype=np.uint32)
    drawn = np.zeros(num_sources, dtype=np.int64)
    for start in range(0, len(source), _STRETCH_SLOTS):
        stretch = source[start : start + _STRETCH_SLOTS]
        counts = np.bincount(stretch, minlength=num_sources)
        firsts = np.cumsum(counts) - counts
        by_source = np.argsort(stretch, kind="stable")
        before[start + by_source] = np.arange(len(stretch)) + np.repeat(drawn - firsts, counts)
        drawn += counts
    return before
