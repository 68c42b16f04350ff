"""Faults of a build, and the words in which each is told: engines that die, too many errors, inputs that go away."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flame.errors import FlameError, InputError
from flame.preprocess import build
from flame.preprocess.attempts import Attempt
from flame.preprocess.ceiling import ErrorCount
from flame.preprocess.plan import Piece, Task
from flame.preprocess.reports import InHand, Progress
from tests.builds import build_here, run_build, same_corpus, some_texts, texts_of, write_jsonl, write_parquet
from tests.engine_faults import dying_on
from tests.tokenizers import write_tiny_tokenizer

MARK = "drop dead"
OPTIONS = {"val_fraction": 0.05, "shard_tokens": 20_000}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, a tokenizer, and the corpora of all texts, and of all but the marked ones."""
    folder = tmp_path_factory.mktemp("faults")
    write_tiny_tokenizer(folder / "tok")
    texts = [some_texts(900, seed=part, longest=200) for part in range(2)]
    texts[0][700] = f"one of a parquet file: {MARK}"
    texts[1][5], texts[1][800] = f"{MARK} and more", f"{MARK}, the second of a file"
    write_parquet(folder / "raw/a.parquet", texts[0])
    write_jsonl(folder / "raw/b.jsonl", texts[1])
    build_here(folder / "raw", folder / "all", folder / "tok", **OPTIONS)
    return folder


def line_start(path: Path, mark: str) -> int:
    """The byte offset of the first line that holds the mark."""
    place = path.read_bytes().index(mark.encode())
    return path.read_bytes().rindex(b"\n", 0, place) + 1


def samples(corpus: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(corpus.glob("rejects/*")) for line in path.read_text().splitlines()]


def test_one_death_is_told_and_changes_nothing(work: Path, tmp_path: Path) -> None:
    env = dying_on(tmp_path, f"{MARK} and", signal_name="SIGKILL", deaths=1)
    result = run_build(work / "raw", tmp_path / "out", work / "tok", env=env, num_workers=1, **OPTIONS)
    assert result.returncode == 0, result.stderr
    told = next(line for line in result.stderr.splitlines() if "died" in line)
    assert told.startswith("a worker died in task ")
    assert "(killed by SIGKILL, as the system does when memory runs out) while it tokenized " in told
    assert f"{work}/raw/b.jsonl, bytes 0 to " in told
    assert told.endswith("; the task is run once more")
    assert same_corpus(tmp_path / "out", work / "all")


def test_a_document_on_which_only_the_fast_engine_dies_is_the_reference_s(work: Path, tmp_path: Path) -> None:
    env = dying_on(tmp_path, MARK, engine="fastokens")
    result = run_build(work / "raw", tmp_path / "out", work / "tok", env=env, engine="fastokens", **OPTIONS)
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if "the reference tokenized it" in line]
    assert len(told) == 3
    row = f"fastokens dies on {work}/raw/a.parquet, row 700 (killed by SIGABRT, a crash): the reference tokenized it"
    assert row in told
    assert same_corpus(tmp_path / "out", work / "all")


def test_a_document_on_which_the_reference_dies_is_named(work: Path, tmp_path: Path) -> None:
    env = dying_on(tmp_path, "a parquet file", signal_name="SIGSEGV")
    result = run_build(work / "raw", tmp_path / "out", work / "tok", env=env, engine="hf", **OPTIONS)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"flame-preprocess: the tokenizer dies on a document (in {work}/raw/a.parquet, row 700; got killed by "
        "SIGSEGV, a crash, 32 bytes that begin 'one of a parquet file: drop dead'). Mend or remove the document, or "
        "leave such documents out and count them with --on_error skip. If memory ran out, use fewer --num_workers."
    )
    assert not (tmp_path / "out/manifest.json").exists()


def test_such_documents_are_left_out_and_counted_where_that_is_wanted(work: Path, tmp_path: Path) -> None:
    env = dying_on(tmp_path, MARK)
    result = run_build(work / "raw", tmp_path / "out", work / "tok", env=env, engine="hf", on_error="skip", **OPTIONS)
    assert result.returncode == 0, result.stderr
    assert "3 engine_crash" in result.stdout
    assert f"what was malformed, and where: {tmp_path}/out/rejects" in result.stdout
    found = {
        (Path(sample["source_file"]).name, sample["row"], sample["reason"]) for sample in samples(tmp_path / "out")
    }
    jsonl = work / "raw/b.jsonl"
    second = line_start(jsonl, f"{MARK}, the second")
    first = line_start(jsonl, f"{MARK} and")
    assert found == {("a.parquet", 700, "engine_crash"), *(("b.jsonl", row, "engine_crash") for row in (first, second))}
    kept = [text for split in ("train", "val") for text in texts_of(tmp_path / "out", split)]
    expected = [text for split in ("train", "val") for text in texts_of(work / "all", split) if MARK not in text]
    assert sorted(kept) == sorted(expected)


def attempt() -> Attempt:
    piece = Piece(
        path="raw/a.jsonl", format="jsonl", compression=None, size_bytes=9, mtime_ns=0, start=0, stop=9, num_bytes=9
    )
    return Attempt(task=Task(index=7, pieces=(piece,)))


def test_a_task_that_cannot_be_finished_is_given_up_in_words() -> None:
    one = attempt()
    one.heard(Progress(input_bytes=5, num_documents=2, in_hand=InHand(path="a", noun="row", first=3, last=9)))
    two, undone = one.after_death("killed by SIGKILL")
    assert (undone.input_bytes, undone.num_documents, two.careful) == (-5, -2, False)
    assert undone.note == (
        "a worker died in task 7 (killed by SIGKILL) while it tokenized a, rows 3 to 9; the task is run once more"
    )
    two.heard(Progress(in_hand=InHand(path="a", noun="row", first=4, last=4)))
    three, undone = two.after_death("killed by SIGSEGV")
    assert three.careful
    assert undone.note == (
        "a worker died in task 7 (killed by SIGSEGV) while it tokenized a, row 4; it is the second time: the documents "
        "are now tried one by one"
    )
    for last, times in ((three, "three times"), (attempt().after_death("x")[0], "twice")):
        with pytest.raises(FlameError) as told:
            last.after_death("killed by SIGSEGV")
        assert str(told.value) == (
            f"a worker died {times} in task 7, while it read or wrote (in raw/a.jsonl; got killed by SIGSEGV). If "
            "memory ran out, use fewer --num_workers, and run the same command again: finished tasks are kept. "
            "Otherwise read these files by themselves, each in a build into another folder, to find the one."
        )


@pytest.mark.parametrize("bad", [0, 2, 20])
def test_more_errors_than_allowed_fail_the_build(tmp_path: Path, bad: int) -> None:
    write_tiny_tokenizer(tmp_path / "tok")
    raw = write_jsonl(tmp_path / "raw.jsonl", [*some_texts(100 - bad), ""])
    with open(raw, "a") as file:
        file.write('{"text": \n' * bad)
    options = {"on_error": "skip", "max_error_fraction": 0.02}
    if bad <= 2:
        manifest = build_here(raw, tmp_path / "out", tmp_path / "tok", **options)
        assert manifest.rejects.get("malformed_json", 0) == bad
        return
    with pytest.raises(InputError) as told:
        build_here(raw, tmp_path / "out", tmp_path / "tok", **options)
    assert str(told.value) == (
        f"more of the input is malformed than --max_error_fraction allows (in {tmp_path}/out; got 20 of 101 documents, "
        f"19.8%; refused until now: 20 malformed_json, 1 empty; expected at most 2%). {tmp_path}/out/rejects names "
        "each place and shows it. Mend the inputs and build into a new folder; or allow more and run the same command "
        "again: finished tasks are kept."
    )
    assert not (tmp_path / "out/manifest.json").exists()
    build_here(raw, tmp_path / "out", tmp_path / "tok", **options | {"max_error_fraction": 0.2})


def test_errors_are_too_many_as_soon_as_that_is_sure() -> None:
    count = ErrorCount(documents=1000, errors=30)
    assert not count.exceeds(None)
    assert count.exceeds(0.02)
    assert not count.exceeds(0.03)
    assert not count.exceeds(0.02, share_read=0.5), "the other half may be without any"
    assert ErrorCount(documents=1000, errors=41).exceeds(0.02, share_read=0.5)
    assert ErrorCount(documents=1, errors=1).exceeds(0.0, share_read=0.001)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("how", ["gone", "changed", "shrunk"])
def test_an_input_that_is_gone_or_another_than_planned_is_named(
    tmp_path: Path, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_tokenizer(tmp_path / "tok")
    path = (write_parquet if kind == "parquet" else write_jsonl)(tmp_path / f"raw.{kind}", some_texts(50))
    make_plan = build.make_plan

    def planned(*arguments: Any) -> Any:
        plan = make_plan(*arguments)
        if how == "gone":
            path.unlink()
        elif how == "shrunk":
            os.truncate(path, size - 9)
        if how != "gone":
            os.utime(path, ns=(1, 1) if how == "changed" else (10**18, 10**18))
        return plan

    monkeypatch.setattr(build, "make_plan", planned)
    size = path.stat().st_size
    os.utime(path, ns=(10**18, 10**18))
    with pytest.raises(InputError) as told:
        build_here(path, tmp_path / "out", tmp_path / "tok")
    assert (
        str(told.value)
        == {
            "gone": f"an input file is gone (in {path}). Put it back, then run the build again.",
            "changed": f"an input file changed after the build was planned (in {path}; got {size:,} bytes, "
            f"written at 1970-01-01T00:00:00Z; expected {size:,} bytes, written at "
            f"2001-09-09T01:46:40Z, as it was planned). Put the old file back, or build into a new folder.",
            "shrunk": f"an input file changed after the build was planned (in {path}; got {size - 9:,} bytes, "
            f"written at 2001-09-09T01:46:40Z; expected {size:,} bytes, written at "
            f"2001-09-09T01:46:40Z, as it was planned). Put the old file back, or build into a new folder.",
        }[how]
    )
    assert not list(tmp_path.glob("out/**/*.tmp"))
