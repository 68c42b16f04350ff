"""`stats` counts what is there: against plain Python over small corpora, and its parts against any numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flame.errors import CorpusError, FlameError, UsageError
from flame.preprocess import corpus_stats, duplicates, shard_stats, tally
from flame.preprocess.distribution import Distribution
from flame.preprocess.duplicates import CopyCounter, records_of
from flame.preprocess.histogram import bar, histogram, table
from flame.preprocess.shard_stats import hosts_of
from flame.preprocess.stats import StatsOptions, stats
from flame.preprocess.stats_plot import draw
from flame.preprocess.tally import Tally
from flame.shards.format import docs_path, ends_path, tokens_path
from flame.shards.manifest import Manifest, SplitInfo, read_manifest, write_manifest
from flame.shards.writer import PROVENANCE_FIELDS, SplitWriter
from tests.corpora import make_corpus, tokenizer_info

TRAIN = [[(number * 7 + place) % 250 + 5 for place in range(number % 90)] for number in range(200)]
TRAIN += [TRAIN[50], TRAIN[50], TRAIN[3]]
VAL = [TRAIN[50], [9] * 5000]


@pytest.fixture
def corpus(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    return make_corpus(tmp_path / "web", TRAIN, val=VAL, shard_tokens=900, tokenizer=tiny_tokenizer)


def counted(corpus: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    assert stats(StatsOptions(corpus=corpus, json=True, **options)) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


# ---- numbers


def test_everything_is_counted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = counted(corpus, capsys)
    documents = [(*tokens, 0) for tokens in (*TRAIN, *VAL)]
    lengths = [len(document) for document in documents]
    assert (value["num_documents"], value["num_tokens"]) == (205, sum(lengths))
    assert value["num_bytes"] == sum(lengths) - 205
    assert value["bytes_per_token"]["mean"] == value["num_bytes"] / value["num_tokens"]
    assert value["bytes_per_token"]["percentiles"]["0"] == 0
    assert value["bytes_per_token"]["percentiles"]["100"] == 0.99
    found = value["document_tokens"]
    assert found["mean"] == np.mean(lengths)
    for percent, number in found["percentiles"].items():
        assert number == np.percentile(lengths, float(percent), method="inverted_cdf")
    assert found["longer_than"]["4096"] == {"num_documents": 1, "num_tokens": 5001}
    assert found["longer_than"]["8192"] == {"num_documents": 0, "num_tokens": 0}
    assert found["histogram"][0] == {
        "low": 1,
        "high": 1,
        "count": lengths.count(1),
        "sum": lengths.count(1),
    }
    assert sum(row["count"] for row in value["document_bytes"]["histogram"]) == 205
    assert value["document_bytes"]["percentiles"]["100"] == 5000
    tokens = Counter(token for document in documents for token in document)
    assert value["tokens"]["num_used"] == len(tokens)
    assert [(row["id"], row["count"]) for row in value["tokens"]["top"]] == sorted(
        tokens.items(), key=lambda item: (-item[1], item[0])
    )[:20]
    assert value["tokens"]["coverage"]["1"] == max(tokens.values())
    assert list(value["tokens"]["coverage"].values())[-1] <= sum(lengths)
    assert value["source_files"] == {
        "num_names": 2,
        "missing_tokens_at_most": 0,
        "top": [
            {"name": "train.jsonl", "num_documents": 203, "num_tokens": sum(lengths[:203])},
            {"name": "val.jsonl", "num_documents": 2, "num_tokens": sum(lengths[203:])},
        ],
    }
    assert value["hosts"] is None
    copies = Counter(documents)
    assert value["duplicates"]["num_documents"] == sum(number - 1 for number in copies.values())
    assert value["duplicates"]["num_tokens"] == sum(len(d) * (number - 1) for d, number in copies.items())
    several = sorted(((n, len(d), documents.index(d)) for d, n in copies.items() if n > 1), reverse=True)[:5]
    assert [(row["count"], row["num_tokens"], row["document"]) for row in value["duplicates"]["most_copied"]] == sorted(
        several, key=lambda row: (-row[0], -row[1], row[2])
    )
    assert several[0][2] == 50 and value["duplicates"]["most_copied"][0]["split"] == "train"


def test_texts_are_those_of_the_tokenizer(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    half = next(token for token in range(512) if tokenizer.decode([token]) == "\ufffd")
    corpus = make_corpus(tmp_path / "c", [tokenizer.encode("a copy").ids] * 2 + [[half] * 99], tokenizer=tiny_tokenizer)
    value = counted(corpus, capsys)
    assert value["duplicates"]["most_copied"] == [
        {
            "count": 2,
            "num_tokens": len(tokenizer.encode("a copy").ids) + 1,
            "split": "train",
            "document": 0,
            "text": "a copy",
        }
    ]
    assert value["tokens"]["top"][0] == {"id": half, "count": 99, "text": tokenizer.id_to_token(half)}
    (corpus / "tokenizer" / "tokenizer.json").unlink()
    value = counted(corpus, capsys)
    assert value["tokens"]["top"][0]["text"] is None and value["duplicates"]["most_copied"][0]["text"] is None


def test_one_split_of_several(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = counted(corpus, capsys, split="val", top=1)
    assert (value["splits"], value["num_documents"]) == (["val"], 2)
    assert value["duplicates"]["num_documents"] == 0
    assert stats(StatsOptions(corpus=corpus, split="val")) == 0
    assert "\nduplicates: none, every document is another\n" in capsys.readouterr().out
    assert [row["name"] for row in value["source_files"]["top"]] == ["val.jsonl"]
    with pytest.raises(CorpusError, match="no split 'test'"):
        stats(StatsOptions(corpus=corpus, split="test"))


def test_without_provenance_only_tokens_are_known(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = make_corpus(tmp_path / "c", TRAIN, shard_tokens=900, tokenizer=tiny_tokenizer, provenance=False)
    value = counted(corpus, capsys, duplicates=False)
    assert [value[name] for name in ("document_bytes", "source_files", "hosts", "duplicates")] == [None] * 4
    assert value["bytes_per_token"] == {"mean": value["num_bytes"] / value["num_tokens"], "percentiles": None}
    assert stats(StatsOptions(corpus=corpus)) == 0
    assert "documents by bytes of text: not known, no provenance was kept" in capsys.readouterr().out


def test_an_empty_split_is_counted_beside_others_and_named_alone(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(corpus)
    splits = {"val": SplitInfo.of(()), "train": manifest.splits["train"]}
    write_manifest(corpus, Manifest(tokenizer=manifest.tokenizer, splits=splits))
    value = counted(corpus, capsys)
    assert value["num_documents"] == 203 and value["duplicates"]["most_copied"][0]["split"] == "train"
    with pytest.raises(CorpusError, match="nothing to count"):
        stats(StatsOptions(corpus=corpus, split="val"))


def test_hosts_where_url_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["https://www.Example.org/a", "http://example.org:80/b", None, "ftp://u:p@files.net?x", "no url"]
    schema = pa.schema([*PROVENANCE_FIELDS, pa.field("url", pa.string())])
    writer = SplitWriter(tmp_path, "train", task=0, shard_tokens=4, docs_schema=schema)
    docs = pa.table(
        {"source_file": ["f"] * 5, "row": range(5), "num_bytes": [1] * 5, "url": pa.array(urls, pa.string())}
    )
    writer.append(np.arange(10, dtype=np.uint32), np.array([2] * 5), docs, num_bytes=np.array([1] * 5))
    splits = {"train": SplitInfo.of(tuple(writer.finish()))}
    write_manifest(tmp_path, Manifest(tokenizer=tokenizer_info(b"{}", 0, 20), splits=splits))
    hosts = counted(tmp_path, capsys)["hosts"]
    assert [(row["name"], row["num_documents"], row["num_tokens"]) for row in hosts["top"]] == [
        ("(none)", 2, 4),
        ("example.org", 2, 4),
        ("files.net", 1, 2),
    ]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://a.b.co.uk/x?y=http://z", "a.b.co.uk"),
        ("HTTP://WWW.X.COM", "x.com"),
        ("https://[2001:db8::1]:8080/", "[2001:db8::1]"),
        ("https://münchen.de#a", "münchen.de"),
        ("https:///path", None),
        ("www.x.com/y", None),
        ("", None),
        ("https://wwwhat.org", "wwwhat.org"),
    ],
)
def test_the_host_of_a_url(url: str, host: str | None) -> None:
    assert hosts_of(pa.array([url])).to_pylist() == [host]


def test_processes_count_the_same(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = counted(corpus, capsys)
    monkeypatch.setattr(corpus_stats, "PROCESS_TOKENS", 0)
    assert counted(corpus, capsys, num_workers=2) == straight
    os.truncate(tokens_path(corpus, "train", "shard-00000-001"), 200)
    with pytest.raises(CorpusError, match=r"was cut short.*shard-00000-001\.tokens\.npy; got 200 bytes") as caught:
        stats(StatsOptions(corpus=corpus, num_workers=2))
    assert caught.value.got == "200 bytes"


class DyingPool(ProcessPoolExecutor):
    """Its processes die as they are given a shard."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        return super().submit(os._exit, 9)


def test_a_killed_process_is_told(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_stats, "PROCESS_TOKENS", 0)
    monkeypatch.setattr(corpus_stats, "ProcessPoolExecutor", DyingPool)
    with pytest.raises(FlameError, match=r"was killed.*train/shard-00000-000.*--num_workers"):
        stats(StatsOptions(corpus=corpus, num_workers=2))


def test_small_chunks_count_the_same(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = counted(corpus, capsys)
    monkeypatch.setattr(shard_stats, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(shard_stats, "DOCS_BATCH_ROWS", 3)
    monkeypatch.setattr(duplicates, "BUCKET_BYTES", 64)
    assert counted(corpus, capsys) == straight


def test_damage_is_named(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ends_path(corpus, "train", "shard-00000-001")
    whole = path.read_bytes()
    path.write_bytes(whole[:136] + bytes(8) + whole[144:])
    with pytest.raises(CorpusError, match=r"do not rise.*shard-00000-001\.ends\.npy.*its document 1"):
        stats(StatsOptions(corpus=corpus))
    path.write_bytes(whole)
    tokens = tokens_path(corpus, "train", "shard-00000-002")
    content = bytearray(tokens.read_bytes())
    content[200:204] = b"\xff\xff\xff\xff"
    tokens.write_bytes(content)
    with pytest.raises(CorpusError, match=r"an id that cannot be right.*got 4294967295; expected none above 254"):
        stats(StatsOptions(corpus=corpus))
    docs = docs_path(corpus, "train", "shard-00000-000")
    docs.write_bytes(docs_path(corpus, "val", "shard-00000-000").read_bytes())
    with pytest.raises(CorpusError, match="not that of its documents"):
        stats(StatsOptions(corpus=corpus))


# ---- parts, for any numbers


@given(st.lists(st.lists(st.integers(0, 1 << 40) | st.integers(0, 9), max_size=20), max_size=4))
def test_a_distribution_is_that_of_all_its_numbers(parts: list[list[int]]) -> None:
    numbers = np.array([number for part in parts for number in part], np.int64)
    found = Distribution.sum_of(Distribution.of(np.array(part, np.int64)) for part in parts)
    assert (found.count, found.sum) == (len(numbers), int(numbers.sum()))
    assert found.values.tolist() == sorted(set(numbers.tolist()))
    bins = found.log2_bins()
    for box in bins:
        inside = numbers[(numbers >= box.low) & (numbers <= box.high)]
        assert (box.count, box.sum) == (len(inside), int(inside.sum()))
    assert sum(box.count for box in bins) == len(numbers)
    assert all(before.high + 1 == after.low for before, after in pairwise(bins))
    for percent in (0, 1, 50, 99, 100):
        expected = np.percentile(numbers, percent, method="inverted_cdf") if len(numbers) else None
        assert found.percentile(percent) == expected
    for limit in (0, 5, 1 << 20):
        above = numbers[numbers > limit]
        assert found.longer_than(limit) == (len(above), int(above.sum()))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=30), st.integers(1, 5))
def test_copies_are_those_of_any_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], pieces: int
) -> None:
    folder = tmp_path_factory.mktemp("copies")
    counter = CopyCounter(folder, num_documents=pieces * duplicates.BUCKET_BYTES // duplicates.RECORD.itemsize)
    step = max(1, len(documents) // pieces)
    for first in range(0, len(documents), step):
        part = documents[first : first + step]
        tokens = np.array([token for document in part for token in document], np.uint32)
        counter.add(records_of(tokens, np.cumsum([len(document) for document in part]), first))
    copies = counter.finish(most_copied=100)
    expected = Counter(map(tuple, documents))
    assert copies.num_documents == sum(number - 1 for number in expected.values())
    assert copies.num_tokens == sum(len(document) * (number - 1) for document, number in expected.items())
    assert [(found.count, found.document) for found in copies.most_copied] == [
        (number, documents.index(list(document)))
        for document, number in sorted(expected.items(), key=lambda x: (-x[1], -len(x[0]), documents.index(list(x[0]))))
        if number > 1
    ]
    assert not list(folder.iterdir())


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 3), st.integers(1, 100)), max_size=40))
def test_a_tally_forgets_no_more_than_it_says(rows: list[tuple[str, int, int]]) -> None:
    limit, tally.MOST_NAMES = tally.MOST_NAMES, 4
    try:
        found = Tally()
        for row in rows:
            found.add([row])
    finally:
        tally.MOST_NAMES = limit
    assert found.num_documents == sum(number for _, number, _ in rows)
    true = Counter[str]()
    for name, _, tokens in rows:
        true[name] += tokens
    for name, tokens in true.items():
        kept = found.counts.get(name, (0, 0))[1]
        assert tokens - found.missing_tokens <= kept <= tokens
    if len(true) <= 4:
        assert found.missing_tokens == 0
    assert [tokens for _, _, tokens in found.top(3)] == sorted((n for _, n in found.counts.values()), reverse=True)[:3]


# ---- on the terminal


@pytest.mark.parametrize("width", [40, 72, 160])
def test_a_histogram_fits_its_width(width: int) -> None:
    bins = Distribution.of(np.array([1, 1, 3, 100, 2000])).log2_bins()
    lines = list(histogram(bins, width=width, ascii_only=False))
    assert len(lines) == 11 and max(map(len, lines)) == width
    assert lines[0].count("█") > 0 and "40.0%" in lines[0]
    assert "▏" not in lines[2] and "█" not in lines[2]
    assert all(line.isascii() for line in histogram(bins, width=width, ascii_only=True))


def test_a_bar_shows_what_is_above_nothing() -> None:
    assert bar(0, 10, ascii_only=False) == ""
    assert bar(1e-9, 10, ascii_only=False) == "▏" and bar(1e-9, 10, ascii_only=True) == "#"
    assert bar(1, 10, ascii_only=False) == "█" * 10 and bar(1, 10, ascii_only=True) == "#" * 10


def test_a_table_cuts_texts_at_their_start() -> None:
    lines = list(table([("1", "a/" * 40 + "end"), ("1,000", "short")], width=30))
    assert [len(line) for line in lines] == [30, 14]
    assert lines[0].startswith("      1  ...") and lines[0].endswith("a/end")


def test_the_screen_is_plain_and_as_wide_as_asked(corpus: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from flame.cli.preprocess import main; code = main(sys.argv[1:])\n"
            "sys.exit(code or bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))",
            *("stats", str(corpus), "--top", "2"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "75", "PYTHONIOENCODING": "ascii"},
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "\x1b" not in run.stdout
    lines = run.stdout.splitlines()
    assert "documents by tokens: number, share of documents, share of all tokens" in lines
    assert max(len(line) for line in lines if "#" in line) == 75 == max(map(len, lines[2:]))  # after the path
    assert "  longer than  4,096: 0.49% of documents, 36.89% of tokens" in lines
    assert any(line.startswith("duplicates: ") for line in lines)
    assert any(line.startswith("  ") and line.endswith("train.jsonl") for line in lines)


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_plot_is_a_picture(corpus: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"stats.{ending}"
    assert stats(StatsOptions(corpus=corpus, plot=path)) == 0
    assert path.read_bytes().startswith(start)


def test_what_is_drawn_is_what_was_counted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    value = counted(corpus, capsys)
    figure = draw(value, title="web: train, val")
    assert figure.get_suptitle() == "web: train, val"
    *by_length, last = figure.axes
    for axes, name, unit in zip(
        by_length, ("document_tokens", "document_bytes"), ("tokens", "bytes of text"), strict=True
    ):
        rows = value[name]["histogram"]
        for bars, what in zip(axes.containers, ("count", "sum"), strict=True):
            whole = sum(row[what] for row in rows)
            drawn = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in bars]
            assert drawn == [
                (max(row["low"], 0.5), row["high"] + 1, pytest.approx(100 * row[what] / whole)) for row in rows
            ]
        assert axes.get_xlabel() == f"length of a document, {unit}" and axes.get_xscale() == "log"
        median = value[name]["percentiles"]["50"]
        assert axes.get_legend_handles_labels()[1] == [f"of documents, median {median}", f"of {unit}"]
    (line,) = last.lines
    assert line.get_xdata().tolist() == [int(number) for number in value["tokens"]["coverage"]]
    covered = [100 * count / value["num_tokens"] for count in value["tokens"]["coverage"].values()]
    assert line.get_ydata().tolist() == pytest.approx(covered) and max(covered) <= 100


def test_without_provenance_two_of_three_pictures_are_drawn(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    corpus = make_corpus(tmp_path / "c", TRAIN, tokenizer=tiny_tokenizer, provenance=False)
    figure = draw(counted(corpus, capsys), title="")
    assert [axes.get_xlabel() for axes in figure.axes] == ["length of a document, tokens", "most common token ids"]


def test_wrong_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, message in (
        ({"num_workers": 0}, "--num_workers cannot be 0"),
        ({"top": -1}, "--top cannot be -1"),
        ({"plot": tmp_path / "a.txt"}, "--plot draws"),
        ({"plot": tmp_path / "absent" / "a.png"}, "folder of --plot"),
    ):
        with pytest.raises(UsageError, match=message):
            StatsOptions(corpus=tmp_path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no such corpus"):
        stats(StatsOptions(corpus=tmp_path / "absent"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'not installed.*pip install "flame\[plot\]"'):
        StatsOptions(corpus=tmp_path, plot=tmp_path / "a.png")
