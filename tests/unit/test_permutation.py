"""The permutation: a bijection for every size, random to the eye of statistics, and the same for ever."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.sampling.permutation import (
    MAX_SIZE,
    epoch_key,
    epoch_offset,
    half_bits,
    permute,
    permute_each,
    round_keys,
    splitmix64,
    splitmix64_scalar,
)

MASK = (1 << 64) - 1
# The first outputs of the published generator, seeded with 1234567 (Steele, Lea & Flood 2014; Rosetta Code).
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]

VECTOR_10 = [2, 5, 8, 3, 0, 9, 6, 4, 7, 1]
VECTOR_LARGE = [124980063068, 339676945734, 910719247423, 258396278050]
VECTOR_KEY = (12051745191145278520, 4030)


def slow_permute(index: int, size: int, key: int) -> int:
    """The same, an index at a time, in Python's integers."""
    bits = 1
    while 1 << 2 * bits < size:
        bits += 1
    keys = [splitmix64_scalar((key + i * 0x9E3779B97F4A7C15) & MASK) for i in range(6)]
    value = index
    while True:
        left, right = value >> bits, value & ((1 << bits) - 1)
        for round_key in keys:
            left, right = right, left ^ (splitmix64_scalar(right ^ round_key) & ((1 << bits) - 1))
        value = left << bits | right
        if value < size:
            return value


def test_splitmix64_is_the_published_one() -> None:
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in range(5)]
    assert [splitmix64_scalar(state) for state in states] == PUBLISHED
    assert splitmix64(np.array(states, dtype=np.uint64)).tolist() == PUBLISHED


@given(st.integers(0, MASK))
def test_both_splitmix64_agree(state: int) -> None:
    assert int(splitmix64(np.array([state], dtype=np.uint64))[0]) == splitmix64_scalar(state)


def test_every_small_size_is_a_bijection() -> None:
    for size in range(1, 300):
        assert sorted(permute(np.arange(size), size, key=size * 7919).tolist()) == list(range(size)), size


@given(st.integers(1, 20_000), st.integers(0, MASK))
def test_any_size_and_key_is_a_bijection(size: int, key: int) -> None:
    assert len(np.unique(permute(np.arange(size), size, key))) == size


@given(st.data(), st.integers(1, MAX_SIZE), st.integers(0, MASK))
def test_large_sizes_are_exact(data: st.DataObject, size: int, key: int) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    assert permute(np.array(index), size, key).tolist() == [slow_permute(i, size, key) for i in index]


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 5, MAX_SIZE])
def test_sizes_beyond_32_bits(size: int) -> None:
    index = [0, 1, 2**31 - 3, size // 2, size - 1]
    found = permute(np.array(index), size, key=5).tolist()
    assert found == [slow_permute(i, size, 5) for i in index]
    assert len(set(found)) == 5 and max(found) < size


@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, MASK), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_many_permutations_at_once(asked: list[tuple[int, int, int]]) -> None:
    index = np.array([i % size for size, _, i in asked])
    sizes = np.array([size for size, _, _ in asked])
    halves = np.array([half_bits(size) for size, _, _ in asked])
    keys = np.array([round_keys(key) for _, key, _ in asked], dtype=np.uint64).T
    expected = [slow_permute(i % size, size, key) for size, key, i in asked]
    assert permute_each(index, sizes, halves, keys).tolist() == expected


def test_keys_give_unrelated_orders() -> None:
    first, second = (permute(np.arange(100_000), 100_000, key) for key in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01
    assert np.count_nonzero(first == second) < 10


def test_an_epochs_key_is_blake2b_of_its_text() -> None:
    text = b"42|sha256:abc|train|3"
    digest = hashlib.blake2b(text, digest_size=8).digest()
    assert epoch_key(42, "sha256:abc", "train", 3) == int.from_bytes(digest, "little")


@given(st.integers(0, MASK), st.integers(1, 2**62))
def test_an_epochs_offset_is_one_of_its_choices(key: int, num_choices: int) -> None:
    assert 0 <= epoch_offset(key, num_choices) < num_choices


def test_offsets_are_even() -> None:
    counts = np.bincount([epoch_offset(key, 10) for key in range(10_000)], minlength=10)
    assert counts.min() > 880 and counts.max() < 1120  # 4 standard errors


def test_vectors_of_version_1() -> None:
    """Frozen: another value would reorder every run that was ever begun."""
    assert permute(np.arange(10), 10, 0).tolist() == VECTOR_10
    assert permute(np.array([0, 1, 2, 10**12 - 1]), 10**12, 12345).tolist() == VECTOR_LARGE
    key = epoch_key(42, "sha256:" + "0" * 64, "train", 0)
    assert (key, epoch_offset(key, 4096)) == VECTOR_KEY
