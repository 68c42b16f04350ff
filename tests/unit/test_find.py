"""From a document back to the samples that hold it: each inverse undoes its function, at any size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.sampling.interleave import TABLE_SLOTS, SlotTable, integer_weights, slot_table
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.permutation import MAX_SIZE, half_bits, permute_each, round_keys, unpermute_each
from flame.sampling.sampler import Sampler

MASK = (1 << 64) - 1


@given(st.lists(st.tuples(st.integers(1, MAX_SIZE), st.integers(0, MASK), st.integers(0, MAX_SIZE)), min_size=1))
def test_unpermuting_undoes_permuting(asked: list[tuple[int, int, int]]) -> None:
    index = np.array([i % size for size, _, i in asked])
    sizes = np.array([size for size, _, _ in asked])
    halves = np.array([half_bits(size) for size, _, _ in asked])
    keys = np.array([round_keys(key) for _, key, _ in asked], dtype=np.uint64).T
    sent = permute_each(index, sizes, halves, keys)
    assert unpermute_each(sent, sizes, halves, keys).tolist() == index.tolist()
    back = unpermute_each(index, sizes, halves, keys)
    assert back.min() >= 0 and np.all(back < sizes)
    assert permute_each(back, sizes, halves, keys).tolist() == index.tolist()


def test_every_small_size_is_undone() -> None:
    for size in range(1, 200):
        keys = np.array(round_keys(size * 7919), dtype=np.uint64)[:, None]
        own = (np.array([size]), np.array([half_bits(size)]), keys)
        assert np.array_equal(unpermute_each(permute_each(np.arange(size), *own), *own), np.arange(size)), size


@pytest.fixture(scope="module")
def table() -> SlotTable:
    return slot_table(integer_weights(list("abcd"), [0.6, 0.25, 0, 0.15]), 42)


def test_every_slot_is_found_from_its_sources_number(table: SlotTable) -> None:
    slots = np.arange(TABLE_SLOTS)
    sources, numbers = table.locate(slots)
    for source in (0, 1, 3):
        own = slots[sources == source]
        assert np.array_equal(table.index_of(source, numbers[own]), own)
        assert np.array_equal(table.index_of(source, np.arange(len(own))), own), "brute force: its slots, in order"


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=50))
def test_numbers_of_any_round_of_the_table_are_found(table: SlotTable, index: list[int]) -> None:
    ks = np.array(index)
    sources, numbers = table.locate(ks)
    for source in set(sources.tolist()):
        own = sources == source
        assert np.array_equal(table.index_of(source, numbers[own]), ks[own])


@dataclass(frozen=True)
class Length:
    """As much of a split as a sampler looks at."""

    num_tokens: int


WEIGHTS = ([1, 0, 0], [2, 1, 1], [0, 1, 3], [0, 0, 1])  # stages may leave sources out, and have one only


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(25, 5000), min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from(WEIGHTS), st.integers(1, 4000)), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(0, 2**40),
)
def test_every_sample_is_found_from_its_window(
    num_tokens: list[int], stages: list[tuple[list[int], int]], window_len: int, far: int
) -> None:
    names = ["a", "b", "c"]
    starts = np.cumsum([0, *(length for _, length in stages[:-1])]).tolist()
    mixture = Mixture(
        data_seed=7,
        sources=tuple(
            Source(name=name, corpus=Path(name), split="train", fingerprint=f"sha256:{name}", num_tokens=count)
            for name, count in zip(names, num_tokens, strict=True)
        ),
        stages=tuple(
            Stage(start_tokens=start, weights=integer_weights(names, weights))
            for start, (weights, _) in zip(starts, stages, strict=True)
        ),
    )
    splits: list[Any] = [Length(count) for count in num_tokens]
    sampler = Sampler(mixture, splits, window_len)
    ks = np.concatenate([np.arange(starts[-1] // window_len + 300), far + np.arange(50)])
    located = sampler.locate(ks)
    for source, epoch in {*zip(located.source.tolist(), located.epoch.tolist(), strict=True)}:
        own = (located.source == source) & (located.epoch == epoch)
        assert np.array_equal(sampler.find_windows(source, epoch, located.window[own]), ks[own])
        starts_found = sampler.first_token(source, epoch) + located.window[own] * window_len
        assert np.array_equal(starts_found, located.offset[own])
    last = mixture.stages[-1].weights
    drawn = sampler.counts(int(ks[-1]))
    for source in range(3):
        found = sampler.samples_of(source, np.array([drawn[source] + 10**6]))
        assert (found[0] == -1) == (last[source] == 0), "a source of weight 0 comes no more"
