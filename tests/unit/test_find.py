"""From a document back to the samples that hold it: each inverse undoes its function, at any size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.cli.mix import main
from flame.sampling.documents import WantedDocuments
from flame.sampling.find import find_in_mixture
from flame.sampling.interleave import TABLE_SLOTS, SlotTable, integer_weights, slot_table
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.mixture_file import write_mixture
from flame.sampling.occurrences import epochs_of, occurrences
from flame.sampling.permutation import MAX_SIZE, half_bits, permute_each, round_keys, unpermute_each
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora
from flame.sampling.trace import trace_samples
from tests.corpora import make_corpus

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


# ---- documents of real corpora

WINDOW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A mixture of `web`, of several shards, whose documents have a url, a score and a missing url; and `bare`."""
    folder = tmp_path_factory.mktemp("find")
    rng = np.random.default_rng(5)
    for name, count in (("web", 60), ("bare", 25)):
        lists = [rng.integers(1, 400, rng.integers(0, 70)).tolist() for _ in range(count)]
        make_corpus(folder / name, lists, tokenizer=tiny_tokenizer, shard_tokens=500, provenance=name == "web")
    for path in (folder / "web" / "train").glob("*.docs.parquet"):
        docs = pq.read_table(path)
        rows = docs.column("row").to_pylist()
        urls = [None if row % 10 == 3 else f"https://{'a.example.com' if row % 2 else 'b.org'}/{row}" for row in rows]
        docs = docs.append_column("url", pa.array(urls)).append_column("score", pa.array([row / 4 for row in rows]))
        pq.write_table(docs, path, row_group_size=4)
    write_mixture(folder / "mix.json", mixture_of_corpora([folder / "web", folder / "bare"], [0.7, 0.3], 3))
    return folder


def found_lines(folder: Path, capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    planned = ["--mixture", folder / "mix.json", "--window_len", WINDOW, "--tokens", 6000, "--json"]
    assert main(["find", *map(str, [*planned, *words])]) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    times = {0: "nowhere", 1: "once"}.get(len(lines), f"{len(lines):,} times")
    assert shown.err.endswith(f"flame-mix find: found {times} in 6,000 tokens\n")
    return lines


def test_what_is_planned_is_what_all_samples_hold(folder: Path) -> None:
    mixture = mixture_of_corpora([folder / "web", folder / "bare"], [0.7, 0.3], 3)
    traced = [part | {"text": None} for part in trace_samples(mixture, WINDOW, range(6000 // WINDOW))]
    found = [
        {name: value for name, value in one.items() if name not in ("epoch", "window")} | {"text": None}
        for one in find_in_mixture(mixture, WINDOW, 6000, WantedDocuments())
    ]
    as_text = [sorted(json.dumps(one, sort_keys=True) for one in some) for some in (found, traced)]
    assert as_text[0] == as_text[1] and len(found) > 375


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--document", "7"], [7]),
        (["--document", "9:11", "--document", "10:12", "--document", "2"], [2, 9, 10, 11]),
        (["--document", "58:"], [58, 59]),
        (["--url", r"example\.com/.$"], [1, 5, 7, 9]),
        (["--url", "null"], []),
        (["--url", "b.org", "--where_column", r"score=^1[0-9]?\."], [*range(4, 8, 2), *range(40, 60, 2)]),
        (["--where_column", "num_bytes=^[0-4]$", "--document", ":30"], None),
        (["--source_file", "train.jsonl", "--row", "4:6", "--row", "33"], [4, 5, 33]),
        (["--source_file", "rain.jsonl", "--row", "4"], []),
        (["--source_file", "train.jsonl", "--document", "55:60"], [55, 56, 57, 58, 59]),
    ],
)
def test_documents_are_found_by_number_and_by_origin(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], rows: list[int] | None
) -> None:
    every = found_lines(folder, capsys, "--source", "web", "--document", "0:")
    assert {one["document"] for one in every} == set(range(60))
    if rows is None:
        rows = sorted({one["row"] for one in every if one["num_bytes"] < 5 and one["row"] < 30})
        assert rows
    expected = [one for one in every if one["row"] in rows]
    assert found_lines(folder, capsys, "--source", "web", *words) == expected


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 2, "looks for no document"),
        (["--document", "3"], 2, "of one source"),
        (["--source", "wbe", "--document", "3"], 2, "no such source"),
        (["--source", "web", "--document", "60"], 1, "no such document"),
        (["--source", "web", "--document", "3:61"], 1, "no such document"),
        (["--source", "bare", "--url", "x"], 1, "is not known"),
        (["--source", "web", "--where_column", "language=x"], 1, "no column 'language'"),
        (["--url", "("], 2, "no regular expression"),
        (["--where_column", "x"], 2, "NAME=REGEX"),
        (["--row", "3", "--url", "x"], 2, "--source_file"),
        (["--run", "exp", "--document", "3"], 2, "knows its mixture"),
    ],
)
def test_wrong_calls_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    assert main(["find", str(folder / "mix.json"), "--window_len", "8", "--tokens", "9000", *words]) == code
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == "" and "unexpected" not in shown.err


@dataclass(frozen=True)
class Sparse:
    """A split of documents of one length, however many."""

    num_tokens: int
    length: int

    def document_bounds(self, document: int) -> tuple[int, int]:
        return document * self.length, (document + 1) * self.length


def test_documents_of_a_corpus_of_trillions_of_tokens_are_exact() -> None:
    """10^13 tokens, three epochs and more: what is found is located where the document lies, and all its tokens."""
    sources = [
        Source(name=name, corpus=Path(name), split="train", fingerprint=f"sha256:{name}", num_tokens=count)
        for name, count in (("web", 10**13), ("code", 10**9))
    ]
    stages = (
        Stage(start_tokens=0, weights=integer_weights(["web", "code"], [0.9, 0.1])),
        Stage(start_tokens=10**13, weights=integer_weights(["web", "code"], [0.99, 0.01])),
    )
    mixture = Mixture(data_seed=1, sources=tuple(sources), stages=stages)
    split: Any = Sparse(10**13, 5000)
    sampler = Sampler(mixture, [split, Sparse(10**9, 5000)], 4096)  # type: ignore[list-item]
    documents = np.array([0, 10**9 + 7, 2 * 10**9 - 1])
    limit = range(3 * 10**13 // 4096)
    epochs = epochs_of(sampler, 0, limit)
    assert epochs == range(3)
    found = occurrences(sampler, split, 0, documents, epochs, limit)
    located = sampler.locate(found.k)
    assert np.array_equal(located.epoch, found.epoch) and np.array_equal(located.window, found.window)
    first = located.offset + found.start - found.document * 5000
    assert np.all(first >= 0) and np.all(first + found.num_tokens <= 5000) and np.all(found.num_tokens > 0)
    for document in documents[:2]:
        for epoch in (0, 1):
            own = (found.document == document) & (found.epoch == epoch)
            skipped = max(sampler.first_token(0, epoch) - document * 5000, 0)  # before the epoch's first window
            assert found.num_tokens[own].sum() == 5000 - skipped
