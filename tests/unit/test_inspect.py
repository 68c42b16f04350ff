"""`inspect` shows what the manifest says, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from flame.errors import CorpusError, UsageError
from flame.preprocess.inspect import InspectOptions, inspect
from flame.preprocess.presence import look_at_files
from flame.shards.manifest import Manifest, SplitInfo, read_manifest, write_manifest
from tests.corpora import make_corpus, tokenizer_info


@pytest.fixture
def corpus(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    documents = [[5] * 9 for _ in range(100)]
    return make_corpus(tmp_path / "web", documents, val=[[300, 1]], shard_tokens=400, tokenizer=tiny_tokenizer)


def test_the_table(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(InspectOptions(corpus=corpus)) == 0
    out = capsys.readouterr().out
    manifest = read_manifest(corpus)
    assert out.startswith(f"{corpus}\n  fingerprint  {manifest.fingerprint}  (format 1)\n")
    assert f"tokenizer    {manifest.tokenizer.fingerprint}" in out
    assert "512 tokens, EOS 0 '<|endoftext|>', no BOS, special text plain" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("  train", "  val"))]
    assert rows == [
        ["train", "3", "100", "1,000", "900", "10.0", "0.900", "5"],
        ["val", "1", "1", "3", "2", "3.0", "0.667", "300"],
    ]
    assert "rejects      none" in out


def test_every_shard(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(InspectOptions(corpus=corpus, shards=True))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "/shard-" in line]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("train/shard-00000-000", "40", "400"),
        ("train/shard-00000-001", "40", "400"),
        ("train/shard-00000-002", "20", "200"),
        ("val/shard-00000-000", "1", "3"),
    ]


def test_as_json(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(InspectOptions(corpus=corpus, json=True)) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["path"] == str(corpus)
    assert value["splits"]["train"].pop("tokens_per_document") == 10
    assert value["splits"]["val"].pop("bytes_per_token") == 2 / 3
    manifest = read_manifest(corpus).to_json()
    assert {key: value[key] for key in manifest if key != "splits"} == {
        k: v for k, v in manifest.items() if k != "splits"
    }
    assert value["splits"]["train"]["shards"] == manifest["splits"]["train"]["shards"]
    assert value["splits"]["train"]["num_shards"] == 3


def test_how_it_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    manifest = Manifest(
        tokenizer=tokenizer_info(b"{}", 0, 9),
        splits={"train": SplitInfo.of(())},
        rejects={"null": 2, "empty": 12},
        engine={"name": "hf", "version": "1.2", "redone_tasks": 3},
        inputs={"num_files": 2, "num_bytes": 12345, "repaired": {"split": 1234, "lone_surrogates": 1}},
        options={
            "seed": 42,
            "dataset": ["raw/é.parquet", "more"],
            "where": None,
            "keep_columns": {"url": "string", "score": "double"},
            "long": "x" * 56,
        },
        built={"flame_version": "0.1", "time": "2026-01-01T00:00:00Z", "host": None},
    )
    write_manifest(tmp_path, manifest)
    assert inspect(InspectOptions(corpus=tmp_path)) == 0
    out = capsys.readouterr().out
    assert "  inputs       2 files, 12,345 bytes, dataset raw/é.parquet, more\n" in out
    assert "  repaired     split 1,234, lone_surrogates 1\n" in out
    assert "  engine       hf 1.2, 3 tasks done again with the reference\n" in out
    assert "  rejects      14 of 14 read (100.00%), empty 12, null 2\n" in out
    assert (
        f"  options      seed 42, keep_columns url (string), score (double),\n               long {'x' * 56}\n" in out
    )
    assert "  built        flame_version 0.1, time 2026-01-01T00:00:00Z\n" in out
    assert "where" not in out and "samples" not in out
    row = next(line for line in out.splitlines() if line.startswith("  train"))
    assert row.split()[1:] == ["0"] * 4 + ["-", "-", "-"]
    assert "EOS 0, no BOS" in out


def test_the_whole_of_several_splits(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(InspectOptions(corpus=corpus))
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  total"))
    assert row.split()[1:] == ["4", "101", "1,003", "902", "9.9", "0.899", "300"]


def test_an_empty_split_beside_a_full_one(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = make_corpus(tmp_path / "c", [[5, 6]], tokenizer=tiny_tokenizer, provenance=False)
    manifest = read_manifest(corpus)
    splits = {"val": SplitInfo.of(()), **manifest.splits}
    write_manifest(corpus, dataclasses.replace(manifest, splits=splits))
    inspect(InspectOptions(corpus=corpus))
    out = capsys.readouterr().out
    assert [line.split()[1:5] for line in out.splitlines() if line.startswith(("  val", "  train", "  total"))] == [
        ["0", "0", "0", "0"],
        ["1", "1", "3", "2"],
        ["1", "1", "3", "2"],
    ]
    assert "  provenance   none was kept\n" in out and "  samples      train 0: " in out


def test_the_files_are_looked_at_and_the_wrong_ones_named(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = InspectOptions(corpus=corpus)
    inspect(options)
    size_bytes = sum(path.stat().st_size for path in corpus.glob("*/shard-*.npy"))
    size_bytes += (corpus / "tokenizer" / "tokenizer.json").stat().st_size
    expected = f"  files        all 9 are there, as long as they were sealed ({size_bytes:,} bytes; looked at now)\n"
    assert expected in capsys.readouterr().out
    (corpus / "train" / "shard-00000-001.ends.npy").unlink()
    os.truncate(corpus / "val" / "shard-00000-000.tokens.npy", 130)
    assert inspect(options) == 0
    out = capsys.readouterr().out
    assert "  files        2 of 9 are wrong" in out
    assert "               train/shard-00000-001.ends.npy: absent\n" in out
    assert "               val/shard-00000-000.tokens.npy: 130 bytes, and 140 were sealed\n" in out
    inspect(InspectOptions(corpus=corpus, json=True))
    assert json.loads(capsys.readouterr().out)["files"]["problems"] == [
        {"path": "train/shard-00000-001.ends.npy", "problem": "absent"},
        {"path": "val/shard-00000-000.tokens.npy", "problem": "130 bytes, and 140 were sealed"},
    ]


def test_provenance_that_was_asked_for_is_missed(corpus: Path) -> None:
    manifest = read_manifest(corpus)
    manifest = dataclasses.replace(manifest, options={"provenance": True})
    assert look_at_files(corpus, manifest).num_files == 13
    (corpus / "train" / "shard-00000-002.docs.parquet").unlink()
    (corpus / "val" / "shard-00000-000.docs.parquet").write_bytes(b"")
    assert look_at_files(corpus, manifest).problems == (
        ("train/shard-00000-002.docs.parquet", "absent"),
        ("val/shard-00000-000.docs.parquet", "empty"),
    )


def test_samples_are_how_documents_begin(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    lists = [tokenizer.encode(text).ids for text in ["one", "two\n\x1b[2J lines", "so long " * 300, "four"]]
    corpus = make_corpus(tmp_path / "c", lists, tokenizer=tiny_tokenizer)
    inspect(InspectOptions(corpus=corpus, samples=9))
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[:2] == ["  samples      train 0: one", "               train 1: two [2J lines"]
    assert lines[2].endswith("...") and len(lines[2]) == 70
    inspect(InspectOptions(corpus=corpus, samples=2, json=True))
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [(sample["document"], sample["num_tokens"]) for sample in samples] == [
        (0, len(lists[0]) + 1),
        (2, len(lists[2]) + 1),
    ]
    assert samples[1]["text"].startswith("so long so long") and len(samples[1]["text"]) <= 300
    (corpus / "tokenizer" / "tokenizer.json").unlink()
    assert inspect(InspectOptions(corpus=corpus)) == 0
    out = capsys.readouterr().out
    assert "tokenizer/tokenizer.json: absent" in out and "samples      cannot be read: the corpus has lost" in out


def test_what_is_no_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such corpus folder"):
        inspect(InspectOptions(corpus=tmp_path / "absent"))
    with pytest.raises(UsageError, match="--samples cannot be -1"):
        InspectOptions(corpus=tmp_path, samples=-1)
    with pytest.raises(CorpusError, match="is no corpus"):
        inspect(InspectOptions(corpus=tmp_path))
