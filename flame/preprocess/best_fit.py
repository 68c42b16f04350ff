"""Best-fit decreasing: pieces into bins of one capacity, each into the fullest one that still takes it.

Pieces are integers of at most the capacity, so bins are kept by what room they have left, and pieces of one length are
dealt to all bins of one room at once. A bin that takes a piece and has room for another of that length is the fullest
that does, so it takes as many as go in: a division. Cost: O(n) in numpy for n pieces, and a step in Python for each
(length, room) that meet, of which there are at most n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD_BITS = 1024


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Return the bin of each piece, and how many bins there are; `lengths` are 1 to `capacity`.

    Of equal pieces the earlier one is dealt first, so the answer is a function of `lengths` alone.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    firsts = np.flatnonzero(np.diff(falling, prepend=0))
    counts = np.diff(firsts, append=len(falling))
    dealt = _Dealt(capacity)
    for length, count in zip(falling[firsts].tolist(), counts.tolist(), strict=True):
        dealt.deal(length, count)
    bins = np.empty(len(lengths), dtype=np.int64)
    bins[order] = dealt.bins()
    return bins, dealt.num_bins


class _Dealt:
    """The bins so far. Those of one room are stretches `(first, stop)` of numbers, since they came about together."""

    def __init__(self, capacity: int) -> None:
        self.num_bins = 0
        self._capacity = capacity
        self._stretches: dict[int, list[tuple[int, int]]] = {}
        self._rooms = _Rooms(capacity)
        self._given: list[tuple[int, int, int]] = []
        """(first bin, how many bins, pieces to each), in the order of the pieces."""

    def deal(self, length: int, count: int) -> None:
        """Deal `count` pieces of one length, no longer than those before."""
        while count:
            room = self._rooms.least(length)
            if room is None:
                room = self._capacity
                each = room // length
                first, self.num_bins = self.num_bins, self.num_bins + -(-count // each)
                stop = self.num_bins
            else:
                each = room // length
                first, stop = self._take(room, -(-count // each))
            whole = min(stop - first, count // each)
            if whole:
                self._give(first, first + whole, each, room - each * length)
                count -= whole * each
            if first + whole < stop:  # the last of these pieces do not fill their bin as far as it would go
                self._give(first + whole, stop, count, room - count * length)
                count = 0

    def bins(self) -> NDArray[np.int64]:
        """Return the bin of each piece that was dealt, in order."""
        first, num_bins, each = np.array(self._given, dtype=np.int64).reshape(-1, 3).T
        sizes = num_bins * each
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(first, sizes) + within // np.repeat(each, sizes)

    def _take(self, room: int, at_most: int) -> tuple[int, int]:
        """Take bins of this room away, and return their numbers `[first, stop)`."""
        stretches = self._stretches[room]
        first, stop = stretches.pop()
        if stop - first > at_most:
            stretches.append((first + at_most, stop))
            stop = first + at_most
        elif not stretches:
            self._rooms.remove(room)
        return first, stop

    def _give(self, first: int, stop: int, each: int, room: int) -> None:
        """Give so many pieces to each of these bins, which have this room left then."""
        self._given.append((first, stop - first, each))
        if room:
            stretches = self._stretches.setdefault(room, [])
            if not stretches:
                self._rooms.add(room)
            stretches.append((first, stop))


class _Rooms:
    """A set of numbers from 1 to `most` that finds its least member of at least some number: bits, in two levels."""

    def __init__(self, most: int) -> None:
        self._words = [0] * (most // _WORD_BITS + 1)
        self._used = 0
        """Bit i: words[i] is not empty."""

    def add(self, number: int) -> None:
        word, bit = divmod(number, _WORD_BITS)
        self._words[word] |= 1 << bit
        self._used |= 1 << word

    def remove(self, number: int) -> None:
        word, bit = divmod(number, _WORD_BITS)
        self._words[word] ^= 1 << bit
        if not self._words[word]:
            self._used ^= 1 << word

    def least(self, number: int) -> int | None:
        """Return the least member of at least `number`."""
        word, bit = divmod(number, _WORD_BITS)
        rest = self._words[word] >> bit
        if rest:
            return number + (rest & -rest).bit_length() - 1
        later = self._used >> (word + 1)
        if not later:
            return None
        word += (later & -later).bit_length()
        found = self._words[word]
        return word * _WORD_BITS + (found & -found).bit_length() - 1
