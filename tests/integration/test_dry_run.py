"""`--dry_run`: figures that the build then has, and nothing left on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flame.preprocess import dry_run
from flame.preprocess.build import build
from flame.preprocess.config import BuildOptions
from flame.preprocess.dry_run import sample_pieces
from flame.preprocess.plan import InputFile, Piece, cut_file
from tests.builds import InlineExecutor, build_here, some_texts, write_jsonl, write_parquet
from tests.tokenizers import write_tiny_tokenizer


class InTurn(InlineExecutor):
    """Runs the tasks in this process, first one first."""

    def run(self, tasks: Sequence[Any], *arguments: Any, **named: Any) -> None:
        super().run(tasks[::-1], *arguments, **named)


def dry(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **more: Any
) -> str:
    """What a dry run in this process says."""
    monkeypatch.setattr("flame.preprocess.build.LocalExecutor", InTurn)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    options = BuildOptions(
        dataset=(str(raw),),
        tokenizer=tmp_path / "tok",
        output=tmp_path / "out",
        dry_run=True,
        val_fraction=0.1,
        num_workers=1,
        **more,
    )
    assert build(options) == 0
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    return capsys.readouterr().out


def test_of_a_small_input_it_says_what_the_build_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_tokenizer(tmp_path / "tok")
    write_jsonl(tmp_path / "raw/a.jsonl", [*some_texts(300), "", " "])
    write_parquet(tmp_path / "raw/b.parquet", some_texts(200, seed=1))
    said = dry(tmp_path / "raw", tmp_path, monkeypatch, capsys)
    assert "(all of the input was read)" in said
    manifest = build_here(tmp_path / "raw", tmp_path / "out", tmp_path / "tok", val_fraction=0.1)
    assert re.search(r"documents +about 500\n", said)
    assert re.search(r"refused +about 0.4% of what is read: in the sample 1 empty, 1 whitespace\n", said)
    tokens = sum(split.num_tokens for split in manifest.splits.values())
    text_bytes = sum(split.num_bytes for split in manifest.splits.values())
    assert re.search(rf"tokens +about {tokens:,}, {text_bytes / tokens:.2f} bytes of text each\n", said)
    assert "with 1 worker of " in said and "there is no room" not in said


def test_copies_are_not_counted_which_is_said_and_a_limit_takes_them_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_tokenizer(tmp_path / "tok")
    texts = some_texts(100)
    write_jsonl(tmp_path / "raw.jsonl", [*texts[:60], *texts])
    choice = {"dedup": "exact", "limit_documents": 90}
    said = dry(tmp_path / "raw.jsonl", tmp_path, monkeypatch, capsys, **choice)
    assert re.search(r"documents +about 90\n", said)
    assert "copies     not counted: a sample holds few. With --dedup documents and tokens are fewer" in said
    manifest = build_here(tmp_path / "raw.jsonl", tmp_path / "out", tmp_path / "tok", **choice)
    assert manifest.splits["train"].num_documents == 60
    assert manifest.rejects == {"duplicate": 30}


def test_of_a_sample_that_is_stopped_it_still_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_tokenizer(tmp_path / "tok")
    write_jsonl(tmp_path / "raw.jsonl", ["the same words in each of them"] * 30_000)
    monkeypatch.setattr(dry_run, "SECONDS_AT_MOST", 0.0)
    monkeypatch.setattr(dry_run, "free_bytes", lambda path: 10)
    said = dry(tmp_path / "raw.jsonl", tmp_path, monkeypatch, capsys)
    assert "all of the input" not in said
    documents = re.search(r"documents +about ([0-9,]+)\n", said)
    assert documents is not None and 0 < int(documents[1].replace(",", "")) <= 30_000
    assert f"there is no room for it in {tmp_path}/out" in said


def files() -> Iterator[InputFile]:
    base = {"size_bytes": 2**30, "mtime_ns": 0}
    yield InputFile(path="a", format="jsonl", compression=None, **base)
    yield InputFile(path="b", format="parquet", compression=None, groups=((10, 2**24),) * 64, **base)
    yield InputFile(path="c", format="jsonl", compression="zstd", **base)


def test_a_sample_is_small_and_from_all_over() -> None:
    pieces: list[Piece] = [piece for file in files() for piece in cut_file(file, 2**25)]
    sample = sample_pieces(pieces, 2**22)
    assert len(sample) == dry_run.SAMPLE_PIECES
    assert {piece.path for piece in sample} >= {"a", "b"}
    for piece in sample:
        whole = next(one for one in pieces if (one.path, one.start) == (piece.path, piece.start))
        if piece.path == "a":
            assert piece.num_bytes == 2**22 == (piece.stop or 0) - piece.start
        elif piece.path == "b":
            assert (piece.stop, piece.num_bytes) == (piece.start + 1, 2**24)
        else:
            assert piece == whole
