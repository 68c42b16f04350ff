"""Where a run stands in its data: as brute-force counting of its samples says, and caps to the window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.errors import MixtureError
from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.position import check_windows_drawn, data_position
from flame.sampling.sampler import Sampler

WINDOW = 10
NAMES = ["web", "code", "math"]


@dataclass(frozen=True)
class Length:
    """All that a sampler asks of a split."""

    num_tokens: int


def make_sampler(caps: list[float | None], *, num_tokens: tuple[int, ...] = (1005, 404, 63)) -> Sampler:
    """Three sources of 100, 40 and 6 windows; the last comes in the second stage, from sample 50 on."""
    sources = tuple(
        Source(name=name, corpus=Path(name), split="train", fingerprint=name, num_tokens=count, max_epochs=cap)
        for name, count, cap in zip(NAMES, num_tokens, caps, strict=True)
    )
    stages = (
        Stage(start_tokens=0, weights=integer_weights(NAMES, [0.75, 0.25, 0])),
        Stage(start_tokens=500, weights=integer_weights(NAMES, [0.5, 0.4, 0.1])),
    )
    splits: list[Any] = [Length(count) for count in num_tokens]
    return Sampler(Mixture(data_seed=3, sources=sources, stages=stages), splits, WINDOW)


SAMPLER = make_sampler([None, None, None])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 600), st.integers(0, 600))
def test_a_position_is_what_its_samples_are(consumed: int, to_come: int) -> None:
    position = data_position(SAMPLER, consumed_samples=consumed, last_sample=consumed + to_come, data_segment=2)
    before, after = (Counter(SAMPLER.locate(np.arange(k)).source.tolist()) for k in (consumed, consumed + to_come))
    assert (position.consumed_tokens, position.remaining_tokens) == (consumed * WINDOW, to_come * WINDOW)
    assert (position.data_segment, position.stage) == (2, int(consumed >= 50))
    upcoming = SAMPLER.locate(np.arange(consumed, consumed + 400))
    for i, (name, windows) in enumerate(zip(NAMES, (100, 40, 6), strict=True)):
        source = position.sources[name]
        assert source.consumed_samples == before[i] and source.consumed_tokens == before[i] * WINDOW
        assert source.remaining_tokens == (after[i] - before[i]) * WINDOW
        assert source.final_epochs == pytest.approx(after[i] / windows, abs=1e-6)
        assert source.percent == pytest.approx(100 * (before[i] - source.epoch * windows) / windows, abs=1e-4)
        assert 0 <= source.percent < 100 and source.epoch == upcoming.epoch[upcoming.source == i][0]


def test_a_run_that_is_over_has_nothing_to_come() -> None:
    position = data_position(SAMPLER, consumed_samples=80, last_sample=60, data_segment=0)
    assert position.remaining_samples == position.remaining_tokens == 0
    assert {source.remaining_tokens for source in position.sources.values()} == {0}


def test_it_is_told_in_a_line() -> None:
    told = str(data_position(SAMPLER, consumed_samples=40, last_sample=45, data_segment=1))
    assert told.startswith(
        "data segment 1, stage 0 (the last is 1), 40 samples (400 tokens) consumed, 50 tokens to come; web"
    )
    assert "web epoch 0, 31.00% (in the end 0.34" in told and "math" not in told and "\n" not in told
    many = [f"s{i}" for i in range(300)]
    sources = tuple(Source(name=n, corpus=Path(n), split="train", fingerprint=n, num_tokens=99) for n in many)
    stage = Stage(start_tokens=0, weights=integer_weights(many, [1.0] * 300))
    splits: list[Any] = [Length(99)] * 300
    sampler = Sampler(Mixture(data_seed=3, sources=sources, stages=(stage,)), splits, WINDOW)
    told = str(data_position(sampler, consumed_samples=0, last_sample=6000, data_segment=0))
    assert len(told) < 1000 and "288 more sources" in told


@pytest.mark.parametrize(("source", "cap"), [(0, 1.5), (1, 1.0), (1, 2.25), (2, 0.5), (2, 3.0)])
def test_a_cap_is_kept_to_the_window(source: int, cap: float) -> None:
    caps: list[float | None] = [None, None, None]
    caps[source] = cap
    sampler = make_sampler(caps)
    drawn = np.cumsum(sampler.locate(np.arange(1000)).source == source)
    allowed = int(np.argmax(drawn > cap * (100, 40, 6)[source]))  # so many samples draw no more
    check_windows_drawn(sampler, allowed)
    with pytest.raises(
        MixtureError, match=rf"{NAMES[source]!r}: .* of at most {cap:g}; .*at most {allowed * WINDOW:,} "
    ):
        check_windows_drawn(sampler, allowed + 1)
    with pytest.raises(MixtureError, match=f"at most {allowed * WINDOW:,} tokens"):
        check_windows_drawn(sampler, 10**6)
