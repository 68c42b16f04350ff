"""The permutation to the eye of statistics: neighbours, blocks and pairs are as in a random order, at any size."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from flame.sampling.permutation import permute

KEYS = [0, 1, 2**63]
LAGS = [1, 2, 3, 16, 1024]
# The numbers of windows, and from where on stretches of their order are looked at (the first size in full).
STRETCHES = {
    3_000_000: [0],
    2**25 + 1: [0, 2**24 - 250_000, 2**25 + 1 - 500_000],
    5_000_000_000: [0, 2**31 - 250_000, 2**32 - 250_000],
}
STRETCH_LEN = 500_000
Orders = list[NDArray[np.int64]]


def stretches(num_windows: int) -> Orders:
    """Parts of the orders of several keys: each the windows of consecutive draws."""
    length = num_windows if STRETCHES[num_windows] == [0] else STRETCH_LEN
    index = [np.arange(start, start + length) for start in STRETCHES[num_windows]]
    return [permute(part, num_windows, key) for key in KEYS for part in index]


@pytest.fixture(scope="module", params=STRETCHES)
def drawn(request: pytest.FixtureRequest) -> tuple[int, Orders]:
    return request.param, stretches(request.param)


def lag_correlations(orders: Orders) -> NDArray[np.float64]:
    """The correlation of draws that are a lag apart, `[orders, lags]`."""
    standard = [(order - order.mean()) / order.std() for order in (part.astype(np.float64) for part in orders)]
    return np.array([[np.dot(part[:-lag], part[lag:]) / (len(part) - lag) for lag in LAGS] for part in standard])


def variance_ratio(num_windows: int, orders: Orders) -> float:
    """Of each 1,000 draws in a row, how many come from each hundredth of a source: variance over a random order's."""
    block, parts = 1000, 100
    ratios = []
    for order in orders:
        num_blocks = len(order) // block
        part = order[: num_blocks * block] // -(-num_windows // parts)
        counts = np.bincount(np.repeat(np.arange(num_blocks), block) * parts + part, minlength=num_blocks * parts)
        share = 1 / parts
        expected = block * share * (1 - share) * (num_windows - block) / (num_windows - 1)  # hypergeometric
        ratios.append(np.mean((counts - block * share) ** 2) / expected)
    return float(np.mean(ratios))


def chi_square_of_pairs(num_windows: int, orders: Orders) -> NDArray[np.float64]:
    """Pairs of draws against independence, on a grid of 64 × 64: in standard deviations, one an order."""
    cells = 64
    found = []
    for order in orders:
        cell = order * cells // num_windows
        pairs = cell[: len(cell) // 2 * 2].reshape(-1, 2)
        seen = np.bincount(pairs[:, 0] * cells + pairs[:, 1], minlength=cells**2).reshape(cells, cells)
        expected = np.outer(seen.sum(1), seen.sum(0)) / len(pairs)
        freedom = (cells - 1) ** 2
        found.append((((seen - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)
    return np.array(found)


def test_draws_a_lag_apart_are_not_correlated(drawn: tuple[int, Orders]) -> None:
    _, orders = drawn
    found = lag_correlations(orders)
    assert (
        abs(found[:, 0].mean()) <= 0.0007 and abs(found.mean()) <= 0.0007
    )  # what six rounds of splitmix64 are to keep
    assert np.abs(found).max() < 4 / len(orders[0]) ** 0.5  # in standard errors of a random order


def test_blocks_are_drawn_from_everywhere(drawn: tuple[int, Orders]) -> None:
    assert 0.994 <= variance_ratio(*drawn) <= 1.005


def test_pairs_of_draws_are_independent(drawn: tuple[int, Orders]) -> None:
    assert np.abs(chi_square_of_pairs(*drawn)).max() < 4


@pytest.mark.parametrize("multiplier", [1_597, 1_103_515_245])
def test_the_statistics_see_an_order_that_is_not_random(multiplier: int) -> None:
    """A linear congruence is a bijection too: blocks of its draws come too evenly, and pairs lie on lines."""
    size = 2**25 + 1
    orders = [np.arange(STRETCH_LEN) * multiplier % size]
    assert not 0.994 <= variance_ratio(size, orders) <= 1.005
    assert chi_square_of_pairs(size, orders)[0] > 100
