"""From a sample's number to its window: arithmetic over the mixture, the same on any number of ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flame.errors import MixtureError, UsageError
from flame.sampling.interleave import SlotTable, slot_table
from flame.sampling.mixture import Mixture, Source, first_sample
from flame.sampling.permutation import (
    ROUNDS,
    epoch_key,
    epoch_offset,
    half_bits,
    permute_each,
    round_keys,
    unpermute_each,
)
from flame.shards.reader import Split

MAX_SAMPLES = 1 << 62  # of a run: indices stay exact in 64 bits


@dataclass(frozen=True)
class Samples:
    """Where some samples lie: arrays of one length. `offset` is the window's first token in its split."""

    source: NDArray[np.int32]
    epoch: NDArray[np.int64]
    window: NDArray[np.int64]
    offset: NDArray[np.int64]


class Sampler:
    """Locates every sample of a mixture for one `window_len`, exactly up to sample 2^62.

    Keeps no state. Building it costs up to 0.5 s and 24 MiB a stage, nothing where a stage draws one source only.
    """

    def __init__(self, mixture: Mixture, splits: Sequence[Split], window_len: int) -> None:
        assert len(splits) == len(mixture.sources), "open_mixture opened these"
        self.mixture = mixture
        self.window_len = window_len
        self._sources = [
            _windowed(mixture.data_seed, source, split, window_len)
            for source, split in zip(mixture.sources, splits, strict=True)
        ]
        _check_windows(mixture, self._sources)
        self._num_windows = np.array([source.num_windows for source in self._sources], dtype=np.int64)
        self._halves = np.array([half_bits(max(1, source.num_windows)) for source in self._sources], dtype=np.int64)
        self._first_samples = [first_sample(stage, window_len) for stage in mixture.stages]
        tables = {weights: _table(weights, mixture.data_seed) for weights in {s.weights for s in mixture.stages}}
        self._tables = [tables[stage.weights] for stage in mixture.stages]
        self._counts_at_stage = [np.zeros(len(splits), dtype=np.int64)]
        for table, first, following in zip(self._tables, self._first_samples, self._first_samples[1:], strict=False):
            self._counts_at_stage.append(self._counts_at_stage[-1] + table.counts_before(following - first))

    @property
    def num_windows(self) -> tuple[int, ...]:
        """How many windows an epoch of each source has."""
        return tuple(self._num_windows.tolist())

    def stage_at(self, k: int) -> int:
        """Return the number of the stage that sample `k` belongs to."""
        return bisect_right(self._first_samples, k) - 1

    def counts(self, k: int) -> NDArray[np.int64]:
        """Return how many samples of each source come before sample `k`. Cost: some milliseconds."""
        stage = self.stage_at(k)
        counts: NDArray[np.int64] = self._counts_at_stage[stage] + self._tables[stage].counts_before(
            k - self._first_samples[stage]
        )
        return counts

    def locate(self, ks: NDArray[np.int64]) -> Samples:
        """Return where the samples `ks` (1-D, any order) lie.

        Cost: some 1.5 ms a call, and 0.3 µs a sample: ask for thousands at once.
        """
        sources, ordinals = self._draw(ks)
        num_windows = self._num_windows[sources]
        epochs, slots = np.divmod(ordinals, num_windows)
        numbers: dict[tuple[int, int], int] = {}  # of each epoch of each source
        which = [numbers.setdefault(pair, len(numbers)) for pair in zip(sources.tolist(), epochs.tolist(), strict=True)]
        orders = [_epoch_order(self._sources[source], epoch) for source, epoch in numbers]
        keys = np.array([order.round_keys for order in orders], dtype=np.uint64).reshape(-1, ROUNDS)
        first_tokens = np.array([order.first_token for order in orders], dtype=np.int64)
        windows = permute_each(slots, num_windows, self._halves[sources], keys[which].T)
        return Samples(
            source=sources.astype(np.int32),
            epoch=epochs,
            window=windows,
            offset=first_tokens[which] + windows * self.window_len,
        )

    def find_windows(self, source: int, epoch: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample that each of these windows of one epoch of a source is; −1 for one that is never drawn.

        The inverse of `locate`. Cost: that of one call of `samples_of`.
        """
        order = _epoch_order(self._sources[source], epoch)
        keys = np.array(order.round_keys, dtype=np.uint64)[:, None]
        own = slice(source, source + 1)
        slots = unpermute_each(windows, self._num_windows[own], self._halves[own], keys)
        return self.samples_of(source, epoch * self._num_windows[source] + slots)

    def samples_of(self, source: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample that each of a source's draws is, numbered from 0; −1 for one that never comes.

        Cost: some milliseconds for each stage that they lie in, however long the run.
        """
        at_stage = np.array([counts[source] for counts in self._counts_at_stage])
        stages = np.searchsorted(at_stage, numbers, side="right") - 1  # stages without the source are passed over
        ks = np.full(len(numbers), -1, dtype=np.int64)
        for stage in np.unique(stages):
            if self.mixture.stages[stage].weights[source]:  # 0 in the last one: it comes no more
                mine = stages == stage
                ks[mine] = self._first_samples[stage] + self._tables[stage].index_of(
                    source, numbers[mine] - at_stage[stage]
                )
        return ks

    def first_token(self, source: int, epoch: int) -> int:
        """Return the token of its split at which an epoch of a source begins: its window 0."""
        return _epoch_order(self._sources[source], epoch).first_token

    def _draw(self, ks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's source and its number within the source."""
        if len(self._tables) == 1:
            return self._tables[0].locate(ks)
        sources, ordinals = np.empty(len(ks), dtype=np.int64), np.empty(len(ks), dtype=np.int64)
        stages = np.searchsorted(self._first_samples, ks, side="right") - 1
        for stage in np.unique(stages):
            mine = stages == stage
            found, counts = self._tables[stage].locate(ks[mine] - self._first_samples[stage])
            sources[mine] = found
            ordinals[mine] = counts + self._counts_at_stage[stage][found]
        return sources, ordinals


def _windowed(data_seed: int, source: Source, split: Split, window_len: int) -> _WindowedSource:
    if source.packs is None:
        return _WindowedSource(data_seed, source.fingerprint, source.split, split.num_tokens, window_len)
    if source.packs.context_len != window_len:
        raise MixtureError(
            f"source {source.name!r} is packed for another length than window_len",
            where=f"{source.corpus}, split {source.split}",
            got=f"window_len {window_len}, packs of {source.packs.context_len} tokens",
            fix=f"Choose window_len {source.packs.context_len} (a divisor of seq_len), or pack the corpus for "
            f"{window_len}: flame-preprocess pack",
        )
    # Packs lie one behind the other as windows do: no token is left over, and the last has one that follows it, too.
    return _WindowedSource(data_seed, source.packs.fingerprint, source.split, source.num_tokens + 1, window_len)


def check_packs(mixture: Mixture, *, varlen: bool) -> None:
    """Raise `UsageError` for packs without varlen: their documents would see one another, and the padding."""
    if mixture.packed_len is not None and not varlen:
        names = ", ".join(source.name for source in mixture.sources if source.packs is not None)
        raise UsageError(
            "packing best_fit keeps documents apart, which needs varlen",
            got=f"packed sources: {names}",
            fix="Add --training.varlen, or sample them by windows",
        )


def _check_windows(mixture: Mixture, sources: Sequence[_WindowedSource]) -> None:
    for i, (described, source) in enumerate(zip(mixture.sources, sources, strict=True)):
        if source.num_windows == 0 and any(stage.weights[i] for stage in mixture.stages):
            raise MixtureError(
                f"source {described.name!r} is too small for one window",
                where=f"{described.corpus}, split {described.split}",
                got=f"{source.num_tokens} tokens",
                expected=f"at least {source.window_len + 1}: window_len, and the token that follows",
                fix="Lower training.window_len, or make a mixture without this source",
            )


@dataclass(frozen=True)
class _EpochOrder:
    """What decides the order of one epoch of one source."""

    round_keys: tuple[int, ...]
    first_token: int


@dataclass(frozen=True)
class _WindowedSource:
    """A source's tokens cut into windows, anew in every epoch."""

    data_seed: int
    fingerprint: str
    split: str
    num_tokens: int
    window_len: int

    @property
    def num_windows(self) -> int:
        return num_windows(self.num_tokens, self.window_len)


@lru_cache(maxsize=4096)
def _epoch_order(source: _WindowedSource, epoch: int) -> _EpochOrder:
    key = epoch_key(source.data_seed, source.fingerprint, source.split, epoch)
    spare = source.num_tokens - 1 - source.num_windows * source.window_len
    return _EpochOrder(round_keys=round_keys(key), first_token=epoch_offset(key, spare + 1))


class _OneSource:
    """The table of a mixture that draws one source only: no table."""

    def __init__(self, source: int, num_sources: int) -> None:
        self._source = source
        self._num_sources = num_sources

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.full(len(index), self._source, dtype=np.int64), index

    def index_of(self, source: int, number: NDArray[np.int64]) -> NDArray[np.int64]:
        assert source == self._source, "no other is drawn"
        return number

    def counts_before(self, index: int) -> NDArray[np.int64]:
        counts = np.zeros(self._num_sources, dtype=np.int64)
        counts[self._source] = index
        return counts


def _table(weights: tuple[int, ...], data_seed: int) -> SlotTable | _OneSource:
    drawn = [source for source, count in enumerate(weights) if count]
    return _OneSource(drawn[0], len(weights)) if len(drawn) == 1 else slot_table(weights, data_seed)


def num_windows(num_tokens: int, window_len: int) -> int:
    """Return how many windows a source of `num_tokens` has: each needs the token that follows it, too."""
    return max(0, (num_tokens - 1) // window_len)
