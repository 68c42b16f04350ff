"""Which window every sample is: the same for any number of ranks, each window once an epoch, exact at any index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.errors import MixtureError, UsageError
from flame.sampling.geometry import BatchGeometry, default_window_len, sample_indices
from flame.sampling.interleave import TABLE_SLOTS, integer_weights
from flame.sampling.mixture import Mixture, Packs, Source, Stage
from flame.sampling.permutation import epoch_key, epoch_offset, permute
from flame.sampling.sampler import Sampler, num_windows
from flame.shards.reader import Split

VECTOR_OF_VERSION_1 = [
    [0, 0, 1003, 64215],
    [0, 0, 1074, 68759],
    [0, 0, 1148, 73495],
    [0, 0, 637, 40791],
    [1, 3, 43, 2752],
    [0, 962380, 1402, 89734],
    [0, 1924761, 434, 27809],
]  # source, epoch, window, offset

VECTOR_OF_STAGES = [
    [0, 0, 1003, 64215],
    [0, 0, 1241, 79447],
    [2, 0, 232, 14866],
    [0, 0, 425, 27223],
    [0, 0, 1052, 67351],
    [1, 3, 43, 2752],
    [2, 1720739, 498, 31895],
]
VECTOR_OF_PACKS = [
    [0, 0, 84, 5376],
    [0, 0, 47, 3008],
    [0, 0, 56, 3584],
    [0, 0, 29, 1856],
    [1, 3, 43, 2752],
    [0, 15032386, 77, 4928],
]
VECTOR_OF_RANK_1 = [[[1004, 1005], [1006, 1007]], [[1016, 1017], [1018, 1019]], [[1028, 1029], [1030, 1031]]]


@dataclass(frozen=True)
class Length:
    """All that a sampler asks of a split."""

    num_tokens: int


def make_mixture(num_tokens: list[int], *stages: tuple[int, list[float]]) -> Mixture:
    names = [f"s{i}" for i in range(len(num_tokens))]
    return Mixture(
        data_seed=42,
        sources=tuple(
            Source(name=name, corpus=Path(name), split="train", fingerprint=f"sha256:{name}", num_tokens=count)
            for name, count in zip(names, num_tokens, strict=True)
        ),
        stages=tuple(Stage(start_tokens=at, weights=integer_weights(names, weights)) for at, weights in stages),
    )


def make_sampler(num_tokens: list[int], *stages: tuple[int, list[float]], window_len: int = 10) -> Sampler:
    splits = cast("list[Split]", [Length(count) for count in num_tokens])
    return Sampler(make_mixture(num_tokens, *stages), splits, window_len)


def locate(sampler: Sampler, ks: Any) -> list[tuple[int, ...]]:
    """(source, epoch, window, offset) of each sample."""
    found = sampler.locate(np.array(ks, dtype=np.int64))
    columns = (found.source, found.epoch, found.window, found.offset)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- windows


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("window_len", [1, 2, 10, 8192])
def test_a_window_needs_the_token_that_follows(k: int, window_len: int) -> None:
    counts = {k * window_len + rest: k for rest in range(1, min(window_len, 5) + 1)}
    counts |= {k * window_len: k - 1, (k + 1) * window_len: k}
    assert {tokens: num_windows(tokens, window_len) for tokens in counts} == counts


def test_nothing_has_no_window() -> None:
    assert [num_windows(tokens, 10) for tokens in (0, 1, 9, 10, 11)] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("num_tokens", [11, 12, 20, 21, 22, 29, 30, 31, 201, 209])
def test_every_epoch_takes_each_window_once_in_another_order(num_tokens: int) -> None:
    """Also: windows do not overlap, and neither they nor the token behind them leave the split."""
    count = (num_tokens - 1) // 10
    sampler = make_sampler([num_tokens], (0, [1]))
    assert sampler.num_windows == (count,)
    orders, starts = set(), set()
    for epoch in range(12):
        found = locate(sampler, range(epoch * count, (epoch + 1) * count))
        assert {row[1] for row in found} == {epoch}
        assert sorted(row[2] for row in found) == list(range(count))
        first = {offset - 10 * window for _, _, window, offset in found}
        assert len(first) == 1 and 0 <= min(first) <= num_tokens - 1 - 10 * count
        starts |= first
        orders.add(tuple(row[2] for row in found))
    assert len(orders) == 12 or count < 10
    assert len(starts) == 1 if (num_tokens - 1) % 10 == 0 else len(starts) > 1


def test_samples_are_what_the_formulas_say() -> None:
    """Source and count from a walk over the table, window and offset from key, permutation and first token."""
    num_tokens = [1234, 77, 500]
    sampler = make_sampler(num_tokens, (0, [5, 1, 3]))
    table = sampler._tables[0]
    drawn = [0, 0, 0]
    expected = []
    for k in range(3000):
        source = int(table.locate(np.array([k]))[0][0])
        count = (num_tokens[source] - 1) // 10
        epoch, slot = divmod(drawn[source], count)
        key = epoch_key(42, f"sha256:s{source}", "train", epoch)
        window = int(permute(np.array([slot]), count, key)[0])
        first = epoch_offset(key, num_tokens[source] - 10 * count)
        expected.append((source, epoch, window, first + 10 * window))
        drawn[source] += 1
    assert locate(sampler, range(3000)) == expected
    assert sampler.counts(3000).tolist() == drawn


def test_any_order_and_repetition_may_be_asked() -> None:
    sampler = make_sampler([1000, 333], (0, [1, 2]))
    straight = locate(sampler, range(500))
    asked = [499, 0, 7, 7, 250]
    assert locate(sampler, asked) == [straight[k] for k in asked]
    assert locate(sampler, []) == []


def test_each_sample_alone_is_as_among_others() -> None:
    """Restoring is starting at another index: every start gives the tail of the whole."""
    sampler = make_sampler([1000, 333, 95], (0, [1, 2, 1]), (1007, [0, 1, 1]))
    whole = locate(sampler, range(300))
    for start in range(300):
        assert locate(sampler, range(start, 300)) == whole[start:]


# ---- stages


def test_a_stage_begins_with_the_sample_at_or_after_its_tokens() -> None:
    sampler = make_sampler([1000, 1000], (0, [1, 0]), (101, [0, 1]), (200, [1, 0]))
    assert [row[0] for row in locate(sampler, range(25))] == [0] * 11 + [1] * 9 + [0] * 5
    assert [sampler.stage_at(k) for k in (0, 10, 11, 19, 20, 10**15)] == [0, 0, 1, 1, 2, 2]


def test_counts_carry_over_stages() -> None:
    """A change of mixture repeats and skips nothing: each source goes through its own samples in order."""
    stages = [(0, [3.0, 1.0, 0.0]), (1234, [1.0, 1.0, 1.0]), (4321, [0.0, 0.2, 0.8])]
    sampler = make_sampler([5000, 5000, 5000], *stages)
    alone = [make_sampler([5000] * 3, (0, [float(i == source) for i in range(3)])) for source in range(3)]
    found = locate(sampler, range(1000))
    for source in range(3):
        mine = [row for row in found if row[0] == source]
        assert mine == locate(alone[source], range(len(mine)))
    for k in (0, 1, 123, 124, 125, 433, 434, 1000):
        assert sampler.counts(k).tolist() == [sum(row[0] == source for row in found[:k]) for source in range(3)]


def test_a_stage_may_be_shorter_than_a_window() -> None:
    sampler = make_sampler([1000, 1000, 1000], (0, [1, 0, 0]), (101, [0, 1, 0]), (105, [0, 0, 1]))
    assert [row[0] for row in locate(sampler, range(9, 14))] == [0, 0, 2, 2, 2]
    assert sampler.counts(14).tolist() == [11, 0, 3]


def test_a_source_added_behind_leaves_the_past_as_it_was() -> None:
    before = make_sampler([1000, 700], (0, [2, 1]))
    after = make_sampler([1000, 700, 400], (0, [2, 1, 0]), (2000, [1, 1, 1]))
    assert locate(after, range(200)) == locate(before, range(200))


# ---- large indices


@pytest.mark.parametrize("k", [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 5, 2**53 + 1, 2**61])
def test_indices_beyond_32_bits_are_exact(k: int) -> None:
    """300 sources, the largest of 10^13 tokens, counted in Python's own integers."""
    num_tokens = [10**13, *(10**9 + 7 * i for i in range(299))]
    sampler = make_sampler(num_tokens, (0, [300.0, *([1.0] * 299)]), window_len=4096)
    table = sampler._tables[0]
    rounds, slot = divmod(k, TABLE_SLOTS)
    source = int(table.locate(np.array([slot]))[0][0])
    weight = sampler.mixture.stages[0].weights[source]
    ordinal = rounds * weight + int(table.counts_before(slot)[source])
    count = (num_tokens[source] - 1) // 4096
    epoch, place = divmod(ordinal, count)
    key = epoch_key(42, f"sha256:s{source}", "train", epoch)
    window = int(permute(np.array([place]), count, key)[0])
    offset = epoch_offset(key, num_tokens[source] - 4096 * count) + 4096 * window
    assert locate(sampler, [k]) == [(source, epoch, window, offset)]
    assert sampler.counts(k)[source] == ordinal


def test_a_weight_of_zero_is_never_drawn_and_needs_no_window() -> None:
    sampler = make_sampler([1000, 3], (0, [1, 0]))
    assert {row[0] for row in locate(sampler, range(1000))} == {0}
    assert sampler.num_windows == (99, 0)


def test_a_source_with_no_window_is_refused_by_name() -> None:
    with pytest.raises(MixtureError, match=r"'s1' is too small .*got 10 tokens; expected at least 11"):
        make_sampler([1000, 10], (0, [1, 1]))
    make_sampler([1000, 11], (0, [1, 1]))


# ---- rows of ranks


def geometry(**values: Any) -> BatchGeometry:
    chosen: dict[str, Any] = {
        "seq_len": 40,
        "window_len": 10,
        "context_len": 10,
        "micro_batch": 2,
        "accumulation": 3,
        "dp_size": 1,
        "varlen": True,
    }
    return BatchGeometry(**(chosen | values))


@settings(max_examples=200)
@given(
    windows=st.integers(1, 5),
    micro_batch=st.integers(1, 5),
    accumulation=st.integers(1, 5),
    dp_size=st.integers(1, 8),
    consumed=st.integers(0, 2**60),
)
def test_a_step_is_the_same_samples_on_any_ranks(
    windows: int, micro_batch: int, accumulation: int, dp_size: int, consumed: int
) -> None:
    """Row j goes to micro-step j // (dp·B), rank (j % (dp·B)) // B, row j % B of it."""
    chosen = geometry(seq_len=10 * windows, micro_batch=micro_batch, accumulation=accumulation, dp_size=dp_size)
    ranks = [sample_indices(chosen, consumed, rank) for rank in range(dp_size)]
    assert all(found.shape == (accumulation, micro_batch, windows) for found in ranks)
    rows = dp_size * micro_batch
    for j in range(rows * accumulation):
        expected = [consumed + j * windows + i for i in range(windows)]
        assert ranks[j % rows // micro_batch][j // rows, j % micro_batch].tolist() == expected
    assert chosen.samples_per_step == rows * accumulation * windows
    assert chosen.tokens_per_step == chosen.samples_per_step * 10


def global_order(steps: list[BatchGeometry]) -> list[int]:
    """The samples of consecutive steps, each of any geometry, in the order that rows, not ranks, define."""
    consumed, order = 0, []
    for step in steps:
        ranks = np.stack([sample_indices(step, consumed, rank) for rank in range(step.dp_size)], axis=1)
        order += ranks.reshape(-1).tolist()
        consumed += step.samples_per_step
    return order


def test_ranks_batch_accumulation_and_row_length_may_change_mid_run() -> None:
    changing = [
        geometry(dp_size=2),
        geometry(dp_size=1, accumulation=6),
        geometry(dp_size=4, micro_batch=1),
        geometry(seq_len=80, dp_size=3),
        geometry(seq_len=10, micro_batch=7),
    ]
    order = global_order(changing)
    assert order == list(range(len(order)))


def test_20_windows_3_ranks_batch_2_50_steps() -> None:
    sampler = make_sampler([201], (0, [1]))
    chosen = geometry(seq_len=10, accumulation=1, dp_size=3)
    seen = [
        locate(sampler, sample_indices(chosen, step * chosen.samples_per_step, rank).reshape(-1))
        for step in range(50)
        for rank in range(3)
    ]
    assert all(len(batch) == 2 for batch in seen)
    windows = [row[2] for batch in seen for row in batch]
    for epoch in range(15):
        assert sorted(windows[epoch * 20 : (epoch + 1) * 20]) == list(range(20))
    assert len({tuple(windows[epoch * 20 : (epoch + 1) * 20]) for epoch in range(15)}) == 15


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window_len": 16}, "window_len must divide"),
        ({"window_len": 80}, "window_len must divide"),
        ({"context_len": 50}, "cannot be longer than a row"),
        ({"varlen": False}, "a row is one window"),
        ({"varlen": False, "window_len": 40}, "context_len must be seq_len"),
        *(({name: 0}, "cannot be 0") for name in ("window_len", "context_len", "micro_batch", "accumulation")),
        ({"seq_len": -5}, "cannot be -5"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        geometry(**values)


def test_without_varlen_a_row_is_a_window() -> None:
    assert geometry(varlen=False, window_len=40, context_len=40).windows_per_row == 1


@pytest.mark.parametrize(
    ("seq_len", "context_len", "expected"),
    [
        (65536, 4096, 8192),
        (65536, 8192, 8192),
        (65536, 10_000, 16384),
        (65536, 65536, 65536),
        (2048, 2048, 2048),
        (24576, 1, 8192),
        (10_007, 1, 10_007),  # a prime
        (3 * 5000, 100, 15_000),
        (3 * 9000, 100, 9000),
    ],
)
def test_a_new_runs_window(seq_len: int, context_len: int, expected: int) -> None:
    assert default_window_len(seq_len, context_len, varlen=True) == expected
    assert default_window_len(seq_len, context_len, varlen=False) == seq_len


def test_vector_of_version_1() -> None:
    """Frozen: another value would reorder every run that was ever begun."""
    sampler = make_sampler([100_003, 5_000], (0, [0.7, 0.3]), window_len=64)
    assert [list(row) for row in locate(sampler, [0, 1, 2, 3, 1000, 2**31 + 1, 2**32 + 5])] == VECTOR_OF_VERSION_1
    other = Sampler(replace(sampler.mixture, data_seed=43), cast("list[Split]", [Length(100_003), Length(5_000)]), 64)
    assert locate(other, range(8)) != locate(sampler, range(8))


def test_vector_of_version_1_over_stages() -> None:
    """Counts carry over: what a source gives in its second stage follows what it gave in the first."""
    stages = (0, [0.7, 0.3, 0]), (64_000, [0.5, 0.25, 0.25])
    sampler = make_sampler([100_003, 5_000, 40_000], *stages, window_len=64)
    found = locate(sampler, [0, 999, 1000, 1001, 1002, 1003, 2**32 + 5])
    assert [list(row) for row in found] == VECTOR_OF_STAGES


def test_vector_of_version_1_of_packs() -> None:
    """The index's fingerprint is in the key, no token is left over, and offsets count packs of context_len."""
    plain = make_mixture([6400, 5000], (0, [0.7, 0.3]))
    packed = replace(plain.sources[0], packs=Packs(context_len=64, fingerprint="sha256:packs"))
    mixture = replace(plain, sources=(packed, plain.sources[1]))
    sampler = Sampler(mixture, cast("list[Split]", [Length(1), Length(5000)]), 64)
    assert sampler.num_windows == (100, 78)
    assert [list(row) for row in locate(sampler, [0, 1, 2, 3, 1000, 2**31 + 1])] == VECTOR_OF_PACKS


def test_vector_of_version_1_of_ranks() -> None:
    assert sample_indices(geometry(seq_len=20, dp_size=3), 1000, 1).tolist() == VECTOR_OF_RANK_1
