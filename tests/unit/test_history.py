"""What `flame-mix trace --run` reads of a run folder: records that are lost, torn, edited, or end before the step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flame.cli.mix import main
from flame.sampling.history import Segment, read_segments
from flame.sampling.mixture_file import read_mixture, write_mixture
from flame.sampling.sources import mixture_of_corpora
from flame.train.run import append_segment, check_start, keep_mixture, read_status, write_config, write_status
from tests.corpora import make_corpus

STEPS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with a corpus and a run over it of four steps, two samples each, whose last two were not logged."""
    folder = tmp_path_factory.mktemp("history")
    make_corpus(folder / "web", [[5 + i] * 9 for i in range(40)], tokenizer=tiny_tokenizer)
    mixture = mixture_of_corpora([folder / "web"], None, 42)
    segment = Segment(
        step=0,
        consumed_samples=0,
        world_size=1,
        dp_size=1,
        micro_batch=1,
        accumulation=1,
        seq_len=32,
        window_len=16,
        samples_per_step=2,
        mixture_fingerprint=mixture.fingerprint,
        data_segment=0,
        data_seed=42,
    )
    run = folder / "run"
    run.mkdir()
    keep_mixture(run, mixture)
    append_segment(run, segment, ["flame-train"])
    write_config(run, "[metrics]\nlog_freq = 2\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    write_status(run, "running", step=0)
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "all")) / "run"


def test_an_edit_of_a_running_mixture_begins_where_the_run_has_not_been(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status tells where it began, its metrics that it has taken two steps of two samples of 16 tokens."""
    (mixture,) = run.glob("mixture-*.json")
    make_corpus(run.parent / "new", [[9] * 9] * 9, tokenizer=run.parent / "web/tokenizer")
    new = [f"--add=new={run.parent / 'new'}:0.5", f"--output={tmp_path / 'b.json'}"]
    words = ["edit", str(mixture), "--run", str(run), *new]
    assert main([*words, "--start=63"]) == 2
    assert "has passed --start already" in capsys.readouterr().err
    assert main([*words, "--start=64"]) == 0
    write_status(run, "preempted", step=3)
    assert main([*words, "--start=95", "--overwrite"]) == 2 and main([*words, "--start=96", "--overwrite"]) == 0
    edited = read_mixture(tmp_path / "b.json")
    again = ["--run", str(run), "--weight=web=1", "--weight=new=3", "--start=128"]
    assert main(["edit", f"{tmp_path / 'b.json'}", *again, f"--output={tmp_path / 'c.json'}"]) == 0, (
        "an edit of its edit"
    )
    write_mixture(tmp_path / "other.json", replace(edited, parents=()))
    capsys.readouterr()
    assert main(["edit", f"{tmp_path / 'other.json'}", *again, f"--output={tmp_path / 'd.json'}"]) == 1
    assert f"Edit the run's own: {mixture}" in capsys.readouterr().err


def traced(run: Path, step: int, *words: str) -> int:
    return main(["trace", "--run", str(run), "--step", str(step), "--json", *words])


def test_a_step_that_the_run_has_not_taken_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traced(run, 1) == traced(run, STEPS) == 0, "it may have died between two logged steps"
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["k"] for line in told} == {0, 1, 6, 7}
    for step in (STEPS + 1, 10**9, 10**30):
        assert traced(run, step) == 1
        assert "has not taken this step" in capsys.readouterr().err
    write_status(run, "preempted", step=3)
    assert traced(run, 3) == 0
    assert traced(run, 4) == 1, "a run that ended well knows its last step"
    for name in ("config.toml", "metrics.jsonl", "status.json"):
        (run / name).write_text("\x00[")
    assert traced(run, 1) == 1
    assert "Traceback" not in capsys.readouterr().err


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values) + "\n")


def lose_mixture(run: Path) -> None:
    next(run.glob("mixture-*")).unlink()


def edit_weights(run: Path) -> None:
    change(next(run.glob("mixture-*")), data_seed=7)


def garble_mixture(run: Path) -> None:
    next(run.glob("mixture-*")).write_text("{")


def move_corpus(run: Path) -> None:
    (run.parent / "web").rename(run.parent / "moved")


def cut_record(run: Path) -> None:
    path = run / "segments.jsonl"
    path.write_text(path.read_text()[:50])


def garble_record(run: Path) -> None:
    path = run / "segments.jsonl"
    path.write_text("garbled\n" + path.read_text())


@pytest.mark.parametrize(
    ("damage", "code", "told"),
    [
        (lose_mixture, 1, "has lost the mixture"),
        (edit_weights, 1, "mixture manifest was changed"),
        (garble_mixture, 1, "no JSON"),
        (move_corpus, 2, "--source web=PATH"),
        (cut_record, 1, "does not say how this step was taken"),
        (garble_record, 1, "segments.jsonl, line 1"),
    ],
)
def test_a_damaged_run_folder_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], code: int, told: str
) -> None:
    damage(run)
    assert traced(run, 1) == code
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == "" and "unexpected" not in shown.err


def test_a_corpus_that_moved_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traced(run, 2) == 0
    before = capsys.readouterr().out
    move_corpus(run)
    assert traced(run, 2, f"--source=web={run.parent / 'moved'}") == 0
    assert capsys.readouterr().out == before


def test_corpora_of_several_data_segments_moved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.parent
    make_corpus(folder / "code", [[7] * 20] * 9, tokenizer=folder / "web" / "tokenizer")
    other = mixture_of_corpora([folder / "code"], None, 42)
    keep_mixture(run, other)
    (first,) = read_segments(run)
    changed = replace(first, step=2, consumed_samples=0, data_segment=1, mixture_fingerprint=other.fingerprint)
    append_segment(run, changed, ["flame-train"])
    assert main(["trace", "--run", str(run), "--step", "1:4", "--json"]) == 0
    before = capsys.readouterr().out
    move_corpus(run)
    (folder / "code").rename(folder / "moved-code")
    moved = [f"--source=web={folder / 'moved'}", f"--source=code={folder / 'moved-code'}"]
    assert main(["trace", "--run", str(run), "--step", "1:4", "--json", *moved]) == 0
    assert capsys.readouterr().out == before
    write_status(run, "preempted", step=4)
    assert main(["find", "--run", str(run), "--source_file", "train.jsonl", "--json", *moved]) == 0
    assert {json.loads(line)["source"] for line in capsys.readouterr().out.splitlines()} == {"web", "code"}
    assert traced(run, 1, *moved, "--source=cod=elsewhere") == 2
    assert "no such source" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"samples_per_step": 0},
        {"samples_per_step": 7},
        {"window_len": 0},
        {"dp_size": "1"},
        {"step": -5},
        {"data_seed": None},
        {"mixture_fingerprint": "../../etc/passwd"},
    ],
)
def test_an_edited_record_is_told(run: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]) -> None:
    change(run / "segments.jsonl", **values)
    assert traced(run, 1) == 1
    told = capsys.readouterr().err
    assert "segments.jsonl, line 1" in told and next(iter(values)) in told


@pytest.mark.parametrize("end", ["", "\n\n", '\n{"torn'])
def test_an_end_that_an_editor_or_a_crash_left_loses_no_start(run: Path, end: str) -> None:
    path = run / "segments.jsonl"
    path.write_text(path.read_text().rstrip("\n") + end)
    (first,) = read_segments(run)
    own = json.loads(path.read_text().splitlines()[0])["run_id"]
    entry = append_segment(run, first, ["flame-train"])
    assert (entry.number, entry.run_id) == (1, own)
    assert [asdict(segment) for segment in read_segments(run)] == [asdict(first)] * 2


@pytest.mark.parametrize("content", ["[]", "null", "3", "{", "\x00"])
def test_a_status_that_cannot_be_understood_is_none(run: Path, content: str) -> None:
    (run / "status.json").write_text(content)
    assert read_status(run) == {}
    check_start(run, {"metrics.log_freq": 2}, resuming=False)
