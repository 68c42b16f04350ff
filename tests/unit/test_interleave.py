"""The order of sources: exact quotas at every prefix, for any weights."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flame.errors import UsageError
from flame.sampling.interleave import (
    BLOCK_SLOTS,
    TABLE_SLOTS,
    SlotTable,
    dealt_slots,
    integer_weights,
    slot_table,
)
from flame.sampling.permutation import splitmix64_scalar

SHAPES = {
    "two equal": [1, 1],
    "seven to three": [0.7, 0.3],
    "one in a million": [1, 1e-6],
    "three": [5, 3, 2],
    "eight rising": list(range(1, 9)),
    "eight powers of two": [2.0**-i for i in range(8)],
    "32 equal": [1] * 32,
    "one large, 99 small": [100] + [1] * 99,
    "128 by Zipf": [1 / (i + 1) for i in range(128)],
    "300 equal": [1] * 300,
    "300 heavy-tailed": np.random.default_rng(3).lognormal(0, 2, 300).tolist(),
}

VECTOR_START = [0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 2, 0, 1, 1, 0, 0, 0, 0, 2, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0]
VECTOR_SHA256 = "810478d547b7c66d4778c4feae615bde1e63294bff749ed6a00a2498fc01da22"


def names(weights: list[float]) -> list[str]:
    return [f"s{i}" for i in range(len(weights))]


def weights_of(values: list[float]) -> tuple[int, ...]:
    return integer_weights(names(values), values)


def worst_prefix_error(order: NDArray[np.integer], slots: tuple[int, ...]) -> float:
    """The largest distance of any source's count from its quota at any prefix; it peaks around its own slots.

    `order` may be a part of the table, from its start.
    """
    drawn = np.bincount(order, minlength=len(slots))
    shares = np.array(slots) / sum(slots)
    by_source = np.argsort(order, kind="stable")
    before = np.empty(len(order))
    before[by_source] = np.arange(len(order)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    share = shares[order]
    index = np.arange(len(order))
    errors = before - index * share, before + 1 - (index + 1) * share, drawn - len(order) * shares
    return float(max(np.abs(error).max() for error in errors))


@st.composite
def any_slots(draw: st.DrawFn, num_sources: int) -> tuple[int, ...]:
    """Whole numbers that sum to a table: from one slot to all but a few, and none at all for some sources."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["equal", "heavy-tailed", "least", "any", "some never"]))
    shares = np.ones(num_sources)
    if kind == "heavy-tailed":
        shares = random.lognormal(0, 4, num_sources)
    elif kind == "any":
        shares = random.dirichlet(shares)
    elif kind == "some never":
        shares = shares * (random.random(num_sources) < 0.5)
        shares[random.integers(num_sources)] = 1
    elif kind == "least":
        shares = np.zeros(num_sources)
        shares[random.integers(num_sources)] = 1
    least = np.zeros(num_sources, dtype=np.int64) if kind == "some never" else np.ones(num_sources, dtype=np.int64)
    slots = least + np.floor(shares / shares.sum() * (TABLE_SLOTS - least.sum())).astype(np.int64)
    slots[np.argmax(slots)] += TABLE_SLOTS - slots.sum()
    return tuple(slots.tolist())


@settings(max_examples=5, deadline=None)
@given(slots=st.sampled_from([1, 2, 5, 40, 300]).flatmap(any_slots), seed=st.integers(0, 2**63 - 1))
def test_every_prefix_of_any_weights_keeps_its_quota(slots: tuple[int, ...], seed: int) -> None:
    assert worst_prefix_error(dealt_slots(slots), slots) <= 1.68
    assert worst_prefix_error(slot_table(slots, seed).source, slots) <= 5


@pytest.mark.parametrize("shape", SHAPES)
def test_every_prefix_keeps_its_quota(shape: str) -> None:
    slots = weights_of(SHAPES[shape])
    assert worst_prefix_error(dealt_slots(slots), slots) <= 1
    assert worst_prefix_error(slot_table(slots, 42).source, slots) <= 5


@pytest.mark.parametrize(
    "values",
    [
        [1.618**i for i in range(24)],  # Fibonacci's, for which a tree is deepest
        [1e-2, *(1.618**i for i in range(20))],
        np.random.default_rng(3).pareto(1.1, 300).tolist(),
    ],
)
def test_no_shape_passes_the_bound_that_holds_for_all(values: list[float]) -> None:
    """An error is half a slot a level of the tree, times the share that is left of it further down.

    Of three nodes below one another the smallest is no larger than what the largest has beside the middle one, so that
    those shares fall at least as the reciprocals of Fibonacci's numbers, whose sum is 3.36.
    """
    slots = weights_of(values)
    assert 0.9 < worst_prefix_error(dealt_slots(slots), slots) <= 1.68


def slow_deal(slots: list[int]) -> list[int]:
    """A Huffman tree by naive search, and every node dealing its slots from the root down, by the formula."""
    nodes: list[tuple[int, int, object]] = [(count, i, i) for i, count in enumerate(slots) if count]
    position = len(slots)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[:2])
        left, right, *nodes = nodes
        nodes.append((left[0] + right[0], position, (left, right)))
        position += 1
    order = [-1] * sum(slots)

    def deal(node: tuple[int, int, object], places: list[int]) -> None:
        c, _, content = node
        if isinstance(content, int):
            for place in places:
                order[place] = content
            return
        left, right = content  # type: ignore[misc]
        l = left[0]  # noqa: E741
        goes_left = [((i + 1) * l + c // 2) // c > (i * l + c // 2) // c for i in range(c)]
        deal(left, [place for place, goes in zip(places, goes_left, strict=True) if goes])
        deal(right, [place for place, goes in zip(places, goes_left, strict=True) if not goes])

    deal(nodes[0], list(range(sum(slots))))
    return order


@settings(max_examples=200)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any))
def test_dealing_is_the_formulas(slots: list[int]) -> None:
    assert dealt_slots(slots).tolist() == slow_deal(slots)


@pytest.fixture(scope="module")
def table() -> SlotTable:
    return slot_table(weights_of([5, 3, 2, 0]), 7)


def test_blocks_hold_what_they_held(table: SlotTable) -> None:
    dealt = dealt_slots(table.counts.tolist()).reshape(-1, BLOCK_SLOTS)
    shuffled = table.source.reshape(-1, BLOCK_SLOTS)
    assert np.array_equal(np.sort(dealt, axis=1), np.sort(shuffled, axis=1))
    assert np.any(dealt != shuffled, axis=1).mean() > 0.9


def test_a_block_is_sorted_by_keyed_splitmix64(table: SlotTable) -> None:
    dealt = dealt_slots(table.counts.tolist())
    for block in (0, 1, 12_345, TABLE_SLOTS // BLOCK_SLOTS - 1):
        slots = range(block * BLOCK_SLOTS, (block + 1) * BLOCK_SLOTS)
        order = sorted(slots, key=lambda slot: (splitmix64_scalar(slot ^ splitmix64_scalar(7)) >> 4, slot))
        assert table.source[slots.start : slots.stop].tolist() == [int(dealt[slot]) for slot in order]


def test_every_place_of_a_block_sees_every_source(table: SlotTable) -> None:
    """Ranks that take every 2nd, 4th, 8th or 16th sample see the mixture, not one source."""
    for place in range(BLOCK_SLOTS):
        shares = np.bincount(table.source[place::BLOCK_SLOTS], minlength=3)[:3] / (TABLE_SLOTS // BLOCK_SLOTS)
        assert np.abs(shares - [0.5, 0.3, 0.2]).max() < 0.01


def test_running_counts_are_the_prefixes(table: SlotTable) -> None:
    for source in range(3):
        mine = np.flatnonzero(table.source == source)
        assert np.array_equal(table.before[mine], np.arange(len(mine)))
        assert len(mine) == table.counts[source]


def test_a_weight_of_zero_is_never_drawn(table: SlotTable) -> None:
    assert table.counts[3] == 0 and table.source.max() == 2


@pytest.mark.parametrize(
    "k", [0, 1, TABLE_SLOTS - 1, TABLE_SLOTS, 5 * TABLE_SLOTS + 99, 2**31 - 1, 2**31, 2**31 + 1, 2**32 + 5, 2**61 + 3]
)
def test_counts_are_exact_at_any_index(table: SlotTable, k: int) -> None:
    rounds, slot = divmod(k, TABLE_SLOTS)
    expected = [
        rounds * count + int(np.count_nonzero(table.source[:slot] == source))
        for source, count in enumerate(table.counts.tolist())
    ]
    assert table.counts_before(k).tolist() == expected
    sources, ordinals = table.locate(np.array([k]))
    assert sources[0] == table.source[slot]
    assert ordinals[0] == expected[sources[0]]


def test_another_seed_gives_another_order() -> None:
    slots = weights_of([2, 1])
    first, second = slot_table(slots, 1), slot_table(slots, 2)
    assert not np.array_equal(first.source, second.source)


def test_sources_behind_that_are_not_drawn_change_nothing() -> None:
    """What a stage of a longer mixture needs: its order is the shorter one's."""
    slots = weights_of([5, 3, 2])
    assert np.array_equal(slot_table(slots, 3).source, slot_table((*slots, 0, 0), 3).source)


# ---- weights


@given(st.lists(st.floats(0.02, 1e3), min_size=1, max_size=50))
def test_slots_are_the_nearest_whole_numbers(values: list[float]) -> None:
    slots = weights_of(values)
    total = math.fsum(values)
    assert sum(slots) == TABLE_SLOTS
    assert all(abs(count - value / total * TABLE_SLOTS) < 1.001 for count, value in zip(slots, values, strict=True))


@pytest.mark.parametrize("scale", [0.3, 1, 100, 1e-300, 1e300])
def test_weights_count_as_shares_of_their_sum(scale: float) -> None:
    assert weights_of([0.7 * scale, 0.3 * scale]) == (2936013, 1258291)


def test_remainders_go_to_the_largest_then_to_the_first() -> None:
    assert weights_of([1, 1, 1]) == (1398102, 1398101, 1398101)


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, -math.inf])
def test_what_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match=r"'s1'.*no weight"):
        weights_of([1, weight])


@pytest.mark.parametrize("values", [[], [0], [0, 0.0]])
def test_nothing_to_draw_is_refused(values: list[float]) -> None:
    with pytest.raises(UsageError, match="no source has a weight above 0"):
        weights_of(values)


@pytest.mark.parametrize("others", [[1], [1e9], [0.1] * 40, [3, 7, 1e-3]])
def test_a_weight_too_small_is_told_the_smallest_that_is_not(others: list[float]) -> None:
    with pytest.raises(UsageError, match=r"'s0'.*too small") as caught:
        weights_of([sum(others) * 1e-8, *others])
    least = float(str(caught.value.expected).split("at least ")[1].split()[0])
    assert weights_of([least, *others])[0] == 1


def test_vectors_of_version_1() -> None:
    """Frozen: another value would reorder every run that was ever begun."""
    table = slot_table(weights_of([0.7, 0.2, 0.1]), 42)
    assert table.source[:32].tolist() == VECTOR_START
    assert hashlib.sha256(table.source.tobytes()).hexdigest() == VECTOR_SHA256
