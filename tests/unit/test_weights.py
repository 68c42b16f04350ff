"""Proportions: sums, floors, caps, and ramps that draw as much as the straight line."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flame.errors import UsageError
from flame.sampling.interleave import TABLE_SLOTS, integer_weights
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.plan import check_epochs
from flame.sampling.weights import floored, ramp, tempered, unimax

SIZES = st.lists(st.integers(1, 10**13), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 10**14), st.floats(0.1, 20))
def test_unimax_is_even_but_for_caps(sizes: list[int], budget: int, max_epochs: float) -> None:
    shares = unimax(sizes, budget, max_epochs)
    assert math.fsum(shares) == pytest.approx(1)
    enough = max_epochs * sum(sizes) >= budget
    if not enough:  # each as often as the others
        assert shares == pytest.approx([size / sum(sizes) for size in sizes])
        return
    epochs = [share * budget / size for share, size in zip(shares, sizes, strict=True)]
    assert max(epochs) <= max_epochs * (1 + 1e-9)
    rounding = budget / TABLE_SLOTS + 1  # a share at its cap is whole slots, of whole tokens
    free = [
        s for s, size in zip(shares, sizes, strict=True) if s * budget < (max_epochs * size - rounding) * (1 - 1e-9)
    ]
    assert all(share == pytest.approx(max(shares)) for share in free), "what is below its cap has the largest share"


@given(
    st.lists(st.integers(10**6, 10**12), min_size=2, max_size=8), st.floats(0.05, 0.99), st.sampled_from([1, 2.5, 4])
)
def test_a_plan_of_unimax_keeps_to_a_cap_of_as_many_epochs(sizes: list[int], part: float, max_epochs: float) -> None:
    """Whole-number weights round no share up beyond the cap that it was made for."""
    budget, names = int(part * max_epochs * sum(sizes)), [f"s{i}" for i in range(len(sizes))]
    try:
        weights = integer_weights(names, unimax(sizes, budget, max_epochs))
    except UsageError:
        assume(False)
    sources = tuple(
        Source(name=n, corpus=Path(n), split="train", fingerprint=n, num_tokens=size, max_epochs=max_epochs)
        for n, size in zip(names, sizes, strict=True)
    )
    check_epochs(Mixture(data_seed=1, sources=sources, stages=(Stage(start_tokens=0, weights=weights),)), budget)


def test_unimax_by_hand() -> None:
    # 100 tokens over sources of 1,000, 10 and 20, at most twice: the 10 give 20, the 20 give 40 (their even share), 40.
    assert unimax([1000, 10, 20], 100, 2) == pytest.approx([0.4, 0.2, 0.4], abs=1e-6)
    assert unimax([5, 5], 100, 1) == [0.5, 0.5]


@given(SIZES, st.floats(0.2, 50))
def test_temperature_evens_out_and_keeps_the_order(sizes: list[int], temperature: float) -> None:
    shares = tempered(sizes, temperature)
    assert math.fsum(shares) == pytest.approx(1)
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    assert all(shares[a] <= shares[b] for a, b in itertools.pairwise(order))
    least, most = order[0], order[-1]
    ratio = math.log(shares[most] / shares[least]) * temperature
    assert ratio == pytest.approx(math.log(sizes[most] / sizes[least]), abs=1e-6)
    assert tempered(sizes, 1) == pytest.approx([size / sum(sizes) for size in sizes])


@given(SIZES, st.floats(0, 1))
def test_a_floor_holds_and_keeps_ratios_above_it(sizes: list[int], part: float) -> None:
    least = part / len(sizes)
    shares = floored(tempered(sizes, 1), least)
    assert math.fsum(shares) == pytest.approx(1) and min(shares) >= least * (1 - 1e-9)
    above = [i for i, share in enumerate(shares) if share > least * (1 + 1e-6)]
    for a, b in itertools.pairwise(above):
        assert shares[a] * sizes[b] == pytest.approx(shares[b] * sizes[a], rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=10),
    st.integers(1, 50),
)
def test_a_ramp_draws_what_the_line_does(pairs: list[tuple[float, float]], num_steps: int) -> None:
    before, after = [one for one, _ in pairs], [other for _, other in pairs]
    levels = ramp(before, after, num_steps)
    assert len(levels) == num_steps
    for i, (one, other) in enumerate(pairs):
        column = [level[i] for level in levels]
        assert math.fsum(column) / num_steps == pytest.approx((one + other) / 2)
        assert all(min(one, other) - 1e-12 <= value <= max(one, other) + 1e-12 for value in column)
        assert column == sorted(column, reverse=other < one)
