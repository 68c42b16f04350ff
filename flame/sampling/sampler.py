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
from flame.sampling.mixture import Mixture, first_sample
from flame.sampling.permutation import epoch_key, epoch_offset, permute
from flame.shards.reader import Split


@dataclass(frozen=True)
class Samples:
    """Where some samples lie: arrays of one length. `offset` is the window's first token in its split."""

    source: NDArray[np.int32]
    epoch: NDArray[np.int64]
    window: NDArray[np.int64]
    offset: NDArray[np.int64]


class Sampler:
    """Locates every sample of a mixture for one `window_len`. State: none; cost: a table of 4 MiB entries a stage."""

    def __init__(self, mixture: Mixture, splits: Sequence[Split], window_len: int) -> None:
        self.mixture = mixture
        self.window_len = window_len
        self.num_windows = [num_windows(split.num_tokens, window_len) for split in splits]
        self._num_tokens = [split.num_tokens for split in splits]
        drawn = np.any([stage.weights for stage in mixture.stages], axis=0)
        for source, windows, used in zip(mixture.sources, self.num_windows, drawn, strict=True):
            if used and windows == 0:
                raise MixtureError(
                    f"source {source.name!r} is too small for one window",
                    where=f"{source.corpus}, split {source.split}",
                    got=f"{source.num_tokens} tokens",
                    expected=f"at least {window_len + 1}, window_len and the token that follows",
                    fix="Lower training.window_len, or leave the source out",
                )
        self._first_samples = [first_sample(stage, window_len) for stage in mixture.stages]
        self._tables = [_table(stage.weights, mixture.data_seed) for stage in mixture.stages]
        self._counts_at_stage = [np.zeros(len(splits), dtype=np.int64)]
        for table, first, following in zip(self._tables, self._first_samples, self._first_samples[1:], strict=False):
            self._counts_at_stage.append(self._counts_at_stage[-1] + table.counts_before(following - first))

    def stage_at(self, k: int) -> int:
        """Return the number of the stage that sample `k` belongs to."""
        return bisect_right(self._first_samples, k) - 1

    def counts(self, k: int) -> NDArray[np.int64]:
        """Return how many samples of each source come before sample `k`."""
        stage = self.stage_at(k)
        counts: NDArray[np.int64] = self._counts_at_stage[stage] + self._tables[stage].counts_before(
            k - self._first_samples[stage]
        )
        return counts

    def locate(self, ks: NDArray[np.int64]) -> Samples:
        """Return where the samples `ks` (1-D, any order) lie."""
        sources, ordinals = self._draw(ks)
        epochs, windows, offsets = (np.empty(len(ks), dtype=np.int64) for _ in range(3))
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            epochs[mine], slots = np.divmod(ordinals[mine], self.num_windows[source])
            for epoch in np.unique(epochs[mine]):
                inside = epochs[mine] == epoch
                found, first_token = self._windows(int(source), int(epoch), slots[inside])
                windows[mine[inside]] = found
                offsets[mine[inside]] = first_token + found * self.window_len
        return Samples(source=sources.astype(np.int32), epoch=epochs, window=windows, offset=offsets)

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

    def _windows(self, source: int, epoch: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        described = self.mixture.sources[source]
        key = _epoch_key(self.mixture.data_seed, described.fingerprint, described.split, epoch)
        count = self.num_windows[source]
        spare = self._num_tokens[source] - 1 - count * self.window_len
        return permute(slots, count, key), epoch_offset(key, spare + 1)


@lru_cache(maxsize=1024)
def _epoch_key(data_seed: int, fingerprint: str, split: str, epoch: int) -> int:
    return epoch_key(data_seed, fingerprint, split, epoch)


class _OneSource:
    """The table of a mixture that draws one source only: no table."""

    def __init__(self, source: int, num_sources: int) -> None:
        self._source = source
        self._num_sources = num_sources

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.full(len(index), self._source, dtype=np.int64), index

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


def default_window_len(seq_len: int, context_len: int, *, varlen: bool) -> int:
    """Return a new run's window: with varlen the smallest divisor of seq_len of at least max(context_len, 8192)."""
    if not varlen:
        return seq_len
    least = max(context_len, 8192)
    return next((length for length in range(least, seq_len) if seq_len % length == 0), seq_len)


@dataclass(frozen=True, kw_only=True)
class BatchGeometry:
    """How samples become rows, micro-batches and steps (docs/design.md, 5.1). Lengths in tokens."""

    seq_len: int
    window_len: int
    context_len: int
    micro_batch: int
    accumulation: int
    dp_size: int
    varlen: bool

    def __post_init__(self) -> None:
        if self.seq_len % self.window_len:
            raise UsageError(
                "training.window_len must divide training.seq_len",
                got=f"window_len {self.window_len}, seq_len {self.seq_len}",
                fix="A resumed run keeps its window_len: choose a seq_len that is a multiple of it",
            )
        if not self.varlen and self.window_len != self.seq_len:
            raise UsageError(
                "without training.varlen a row is one window",
                got=f"window_len {self.window_len}, seq_len {self.seq_len}",
                expected="window_len equal to seq_len",
            )
        if not self.varlen and self.context_len != self.seq_len:
            raise UsageError(
                "without training.varlen nothing cuts a row: context_len must be seq_len",
                got=f"context_len {self.context_len}, seq_len {self.seq_len}",
                fix="Leave training.context_len away, or add --training.varlen",
            )

    @property
    def windows_per_row(self) -> int:
        return self.seq_len // self.window_len

    @property
    def samples_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.dp_size * self.windows_per_row

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.window_len


def sample_indices(geometry: BatchGeometry, consumed_samples: int, dp_rank: int) -> NDArray[np.int64]:
    """Return the samples that one rank sees in a step: `[accumulation, micro_batch, windows_per_row]`."""
    g = geometry
    step = np.arange(g.samples_per_step, dtype=np.int64) + consumed_samples
    return step.reshape(g.accumulation, g.dp_size, g.micro_batch, g.windows_per_row)[:, dp_rank]
