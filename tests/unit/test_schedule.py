"""The learning rate: the numbers of the design, and its shape wherever warm-up and decay begin and end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.train.schedule import SCHEDULES, lr_factor


def curve(
    total: int, warmup: int, *, ratio: float | None = None, kind: str = "cosine", lr_min: float = 0.1
) -> list[float]:
    return [
        lr_factor(step, warmup_steps=warmup, total_steps=total, decay_ratio=ratio, decay_type=kind, lr_min=lr_min)
        for step in range(total)
    ]


def test_the_ten_values_of_the_design() -> None:
    expected = [0.333, 0.667, 1, 1, 0.955, 0.831, 0.650, 0.450, 0.269, 0.145]
    assert [round(factor, 3) for factor in curve(10, 3)] == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [1, 1, 0.775, 0.55, 0.325]), ("sqrt", [1, 1, 0.55, 0.3636, 0.2206]), ("cosine", [1, 1, 0.8682, 0.55])],
)
def test_the_way_down_of_each_type(kind: str, expected: list[float]) -> None:
    # N = 8, W = 2: the decay takes half, 4 steps, and would be at lr_min one step after the last.
    factors = curve(8, 2, ratio=0.5, kind=kind)[3:]
    assert factors[: len(expected)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("total", "warmup", "ratio", "expected"),
    [
        (4, 0, None, [1, 0.775, 0.55, 0.325]),  # no warm-up: the first step is at the top
        (4, 1, None, [1, 1, 0.7, 0.4]),
        (4, 4, None, [0.25, 0.5, 0.75, 1]),  # warm-up to the end: no decay is left
        (4, 8, None, [0.125, 0.25, 0.375, 0.5]),  # warm-up longer than the run: never at the top
        (4, 8, 0.5, [0.125, 0.25, 0.375, 0.5]),
        (4, 1, 0.0, [1, 1, 1, 1]),  # no decay
        (4, 3, 1.0, [1 / 3, 2 / 3, 1, 1]),  # a decay of all steps is cut to what warm-up leaves: one
        (1, 0, None, [1]),
        (1, 1, None, [1]),
        (1, 0, 1.0, [1]),
    ],
)
def test_edges(total: int, warmup: int, ratio: float | None, expected: list[float]) -> None:
    assert curve(total, warmup, ratio=ratio, kind="linear") == pytest.approx(expected)


@given(
    total=st.integers(1, 60),
    warmup=st.integers(0, 80),
    ratio=st.none() | st.floats(0, 1),
    kind=st.sampled_from(sorted(SCHEDULES)),
    lr_min=st.floats(0, 1),
)
def test_up_flat_down(total: int, warmup: int, ratio: float | None, kind: str, lr_min: float) -> None:
    factors = curve(total, warmup, ratio=ratio, kind=kind, lr_min=lr_min)
    rising, after = factors[:warmup], factors[warmup:]
    assert rising == [(step + 1) / warmup for step in range(len(rising))]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert all(lr_min - 1e-12 <= factor <= 1 for factor in after)
    if after:
        assert after[0] == 1
        num_decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
        flat = after[: max(1, len(after) - num_decay + 1)]
        assert flat == [1.0] * len(flat)
        if lr_min < 0.99 and num_decay > 1:
            assert after[len(flat)] < 1  # the decay begins where the formula says, not later


@given(total=st.integers(1, 40), warmup=st.integers(0, 10), more=st.integers(1, 40))
def test_a_longer_run_changes_nothing_before_its_decay(total: int, warmup: int, more: int) -> None:
    # A run extended in its flat stretch goes on as if it had been that long from the start.
    short = curve(total, warmup, ratio=0.2)
    long = curve(total + more, warmup, ratio=0.2)
    flat = max(total - round(total * 0.2), 0)
    assert long[:flat] == short[:flat]


def test_a_step_beyond_the_end_stays_at_the_minimum() -> None:
    factor = lr_factor(50, warmup_steps=3, total_steps=10, decay_ratio=None, decay_type="cosine", lr_min=0.1)
    assert factor == pytest.approx(0.1)
