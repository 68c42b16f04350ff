"""The sampler over mixtures of any shape: 1 to 300 sources, 10^3 to 10^13 tokens, any weights, stages and edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.sampling.mixture import Mixture, Source, Stage, first_sample
from flame.sampling.sampler import Sampler, Samples
from flame.shards.reader import Split
from tests.unit.test_interleave import any_slots, worst_prefix_error
from tests.unit.test_sampler import Length, make_mixture

NUM_SAMPLES = 40_000  # that are looked at one by one, from the run's first on
BOUND = 5  # samples between a source's count and its quota, at any prefix of a stage


@dataclass(frozen=True)
class Case:
    """A mixture of stages, what an edit made of it, and the lengths of all sources."""

    mixture: Mixture
    edited: Mixture
    lengths: tuple[int, ...]
    window_len: int

    def sampler(self, mixture: Mixture) -> Sampler:
        splits = cast("list[Split]", [Length(count) for count in self.lengths[: len(mixture.sources)]])
        return Sampler(mixture, splits, self.window_len)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_sources, added = draw(st.sampled_from([1, 2, 3, 17, 128, 300])), draw(st.integers(0, 2))
    window_len = draw(st.sampled_from([1, 16, 100, 999]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = (10 ** random.uniform(3, 13, num_sources + added)).astype(np.int64)
    lengths[0] = draw(st.sampled_from([1000, 1001, 10**6, 10**13]))
    first_stop, edit = (int(random.integers(1, NUM_SAMPLES * window_len * 2 // 3)) for _ in range(2))
    plain = make_mixture(lengths[:num_sources].tolist(), (0, [1.0] * num_sources))
    stages = (
        Stage(start_tokens=0, weights=draw(any_slots(num_sources))),
        Stage(start_tokens=first_stop, weights=draw(any_slots(num_sources))),
    )
    mixture = replace(plain, stages=stages, data_seed=draw(st.integers(0, 2**63 - 1)))
    return Case(
        mixture,
        edit_of(mixture, lengths, edit, draw(any_slots(num_sources + added))),
        tuple(lengths.tolist()),
        window_len,
    )


def edit_of(mixture: Mixture, lengths: NDArray[np.int64], start: int, weights: tuple[int, ...]) -> Mixture:
    """What `flame-mix edit --replace_later` makes: a last stage from `start` on, sources behind the others."""
    added = make_mixture(lengths.tolist(), (0, [1.0] * len(lengths))).sources[len(mixture.sources) :]
    kept = tuple(
        Stage(start_tokens=stage.start_tokens, weights=stage.weights + (0,) * len(added))
        for stage in mixture.stages
        if stage.start_tokens < start
    )
    sources: tuple[Source, ...] = mixture.sources + added
    parents = (mixture.fingerprint, *mixture.parents)
    last = Stage(start_tokens=start, weights=weights)
    return replace(mixture, sources=sources, stages=(*kept, last), parents=parents)


def assert_no_gap_and_no_copy(samples: Samples, num_windows: Sequence[int]) -> None:
    """Of each source, epochs come one after the other, and every window of one comes once before the next begins."""
    for source in np.unique(samples.source):
        mine = samples.source == source
        epochs, windows, n = samples.epoch[mine], samples.window[mine], num_windows[source]
        assert np.array_equal(epochs, np.arange(len(epochs)) // n)
        numbers = epochs * n + windows
        assert len(np.unique(numbers)) == len(numbers) and windows.min() >= 0 and windows.max() < n


def assert_quotas(mixture: Mixture, window_len: int, sources: NDArray[np.int32]) -> None:
    """After each sample every count is near its quota, which the stages before it make as well."""
    firsts = [first_sample(stage, window_len) for stage in mixture.stages] + [len(sources)]
    for stage, first, stop in zip(mixture.stages, firsts, firsts[1:], strict=False):
        order = sources[first:stop].astype(np.int64)
        if len(order):
            assert worst_prefix_error(order, stage.weights) <= BOUND


@settings(max_examples=5, deadline=None)
@given(cases())
def test_any_mixture_draws_each_window_once_an_epoch_within_its_quotas_through_stages_and_edits(case: Case) -> None:
    before, after = case.sampler(case.mixture), case.sampler(case.edited)
    ks = np.arange(NUM_SAMPLES)
    old, new = before.locate(ks), after.locate(ks)
    for mixture, sampler, samples in ((case.mixture, before, old), (case.edited, after, new)):
        assert_no_gap_and_no_copy(samples, sampler.num_windows)
        assert_quotas(mixture, case.window_len, samples.source)
    begun = first_sample(case.edited.stages[-1], case.window_len)
    for name in ("source", "epoch", "window", "offset"):
        assert np.array_equal(getattr(old, name)[:begun], getattr(new, name)[:begun]), "the past stays as it was"
    told = {"consumed_samples": begun, "window_len": case.window_len}
    assert case.edited.is_continuation_of(case.mixture, **told)
    assert_exact_far_away(case, after)


def assert_exact_far_away(case: Case, sampler: Sampler) -> None:
    """Samples anywhere in a run of 2^61 are their windows' own: locating them is undone, and leads into the source."""
    ks = np.array([0, NUM_SAMPLES, 2**31 - 1, 2**31, 2**32 + 5, 2**53 + 1, 2**61])
    found = sampler.locate(ks)
    for i, k in enumerate(ks.tolist()):
        source, epoch = int(found.source[i]), int(found.epoch[i])
        assert sampler.find_windows(source, epoch, found.window[i : i + 1]).tolist() == [k]
        assert found.offset[i] >= 0 and found.offset[i] + case.window_len < case.lengths[source]
        assert sampler.counts(k)[source] // sampler.num_windows[source] == epoch


starts = st.tuples(st.integers(1, 1024), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(st.lists(starts, min_size=1, max_size=5), st.integers(0, 2**60))
def test_any_world_sizes_batches_and_row_lengths_see_one_stream(
    steps: list[tuple[int, int, int, int]], at: int
) -> None:
    """Each start has (ranks, micro-batch, accumulation, windows a row): rows in order hold the samples in order."""
    for dp_size, micro_batch, accumulation, windows in steps:
        step = BatchGeometry(
            seq_len=windows * 8,
            window_len=8,
            context_len=8,
            micro_batch=micro_batch,
            accumulation=accumulation,
            dp_size=dp_size,
            varlen=True,
        )
        some = sorted({0, dp_size // 2, dp_size - 1})
        rows = np.arange(at, at + step.samples_per_step).reshape(accumulation, dp_size, micro_batch, windows)
        for rank in some:
            assert np.array_equal(sample_indices(step, at, rank), rows[:, rank])
        at += step.samples_per_step
        assert step.samples_per_step == micro_batch * accumulation * dp_size * windows
