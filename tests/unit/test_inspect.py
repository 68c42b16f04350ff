"""`inspect` shows what the manifest says, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flame.errors import CorpusError, UsageError
from flame.preprocess.inspect import InspectOptions, inspect
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


def test_how_it_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest(
        tokenizer=tokenizer_info(b"{}", 0, 9),
        splits={"train": SplitInfo.of(())},
        rejects={"null": 2, "empty": 12},
        engine={"name": "hf", "redone_tasks": 0},
        options={"seed": 42, "dataset": ["raw/é.parquet"], "where": None, "keep_columns": {}},
    )
    write_manifest(tmp_path, manifest)
    inspect(InspectOptions(corpus=tmp_path))
    out = capsys.readouterr().out
    assert "  rejects      null 2, empty 12\n  engine       name hf, redone_tasks 0\n  inputs       none\n" in out
    assert '  options      seed 42\n               dataset ["raw/é.parquet"]\n' in out
    assert "where" not in out and "keep_columns" not in out
    assert next(line for line in out.splitlines() if line.startswith("  train")).split()[1:] == ["0"] * 4 + [
        "-",
        "-",
        "0",
    ]
    assert "EOS 0, no BOS" in out


def test_what_is_no_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such corpus folder"):
        inspect(InspectOptions(corpus=tmp_path / "absent"))
    with pytest.raises(CorpusError, match="is no corpus"):
        inspect(InspectOptions(corpus=tmp_path))
