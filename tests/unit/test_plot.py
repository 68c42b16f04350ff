"""`flame-train plot`: which points are drawn, how they are named, and what cannot be drawn."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from flame.cli.train import main
from flame.train.plot import LOSS, PlotOptions, curves_of


def write_run(folder: Path, steps: list[int], **more: Any) -> Path:
    """A run of one second a step and ten tokens, whose loss is 100 − step; every tenth step is validated."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in steps:
            line = {"step": step, "consumed_tokens": 10 * step, LOSS: 100.0 - step, "time_metrics/end_to_end(s)": 36.0}
            if step % 10 == 0:
                line["validation/web/loss"] = 50.0
            file.write(json.dumps({**line, **more}) + "\n")
        file.write('{"step": 1000, "cons')  # being written
    return folder


def options(*runs: Path, **changes: Any) -> PlotOptions:
    return PlotOptions(run=runs, output=runs[0].parent / "loss.png", **changes)


@pytest.mark.parametrize(
    ("x", "expected"), [("steps", [5, 10, 15]), ("tokens", [50, 100, 150]), ("time", [0.05, 0.1, 0.15])]
)
def test_a_run_over_tokens_steps_and_time(tmp_path: Path, x: str, expected: list[float]) -> None:
    (loss, validation), num_averaged = curves_of(options(write_run(tmp_path / "a", [5, 10, 15]), x=x))
    assert num_averaged == 1 and not loss.is_validation and validation.is_validation
    assert loss.x.tolist() == pytest.approx(expected) and loss.y.tolist() == [95, 90, 85]
    assert (validation.name, validation.x.tolist(), validation.y.tolist()) == ("a/web", [loss.x[1]], [50])


def test_steps_that_were_taken_back_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1, 2, 3, 4, 3, 4, 5])
    (tmp_path / "a/metrics.abandoned.jsonl").write_text((run / "metrics.jsonl").read_text())
    (loss,), _ = curves_of(options(run, x="steps"))
    assert loss.x.tolist() == [1, 2, 3, 4, 5]


def test_means_are_of_the_last_points_and_many_points_are_averaged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", list(range(1, 8)))
    (loss,), num_averaged = curves_of(options(run, smooth=3))
    assert num_averaged == 3 and loss.y.tolist() == [99, 98.5, 98, 97, 96, 95, 94]
    assert curves_of(options(write_run(tmp_path / "b", list(range(1, 1001)))))[1] == 5


def test_numbers_that_are_not_known_are_gaps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1, 2])
    with open(run / "metrics.jsonl", "r+") as file:
        lines = [json.loads(line) for line in file.read().splitlines()[:2]]
        file.seek(0)
        file.truncate()
        file.writelines(json.dumps(line) + "\n" for line in ({**lines[0], LOSS: None}, lines[1]))
    (loss,), _ = curves_of(options(run, x="steps"))
    assert loss.x.tolist() == [2]


def test_another_metric_of_runs_of_one_name(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run", [10, 20], **{"mfu(%)": 40}) for name in ("a", "b")]
    curves, _ = curves_of(options(*runs, metric="mfu(%)"))
    assert [curve.name for curve in curves] == [str(run) for run in runs]
    assert [curve.run for curve in curves] == [0, 1] and np.array_equal(curves[1].y, [40, 40])


def test_forty_runs_are_drawn_with_a_name_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / f"run-{i}", list(range(1, 30 + i))) for i in range(40)]
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))[1])
    assert main(["plot", *map(str, runs), "--output", str(tmp_path / "all.png"), "--smooth", "4"]) == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    (axis,) = figures[0].axes
    dashed = [line for line in axis.get_lines() if line.get_linestyle() == "--"]
    solid = [line for line in axis.get_lines() if line.get_linestyle() == "-"]
    assert len(solid) == len(dashed) == 40 and len({tuple(line.get_color()) for line in solid}) == 40
    assert {tuple(line.get_color()) for line in dashed} == {tuple(line.get_color()) for line in solid}
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [f"run-{i}" for i in range(40)]  # the highest end first
    assert axis.get_ylabel() == "loss (nats a label), mean of 4 logged steps, dashed: validation"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs a run"),
        (["empty"], "no logged steps (got"),
        (["run", "--metric", "mfu"], "no number of this name"),
        (["run", "--metric", "grad_norm"], "expected one of consumed_tokens, "),
        (["run", "--output", "loss.txt"], ".png, .svg or .pdf"),
        (["run", "--output", "nowhere/loss.png"], "does not exist"),
        (["run", "--smooth", "0"], "--smooth"),
        (["run", "--x", "epochs"], "epochs"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", [1])
    (tmp_path / "empty").mkdir()
    assert main(["plot", *words]) == 2
    assert told in capsys.readouterr().err and not list(tmp_path.glob("*.png"))


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plot", str(write_run(tmp_path / "a", [1]))]) == 2
    assert 'pip install "flame[plot]"' in capsys.readouterr().err


def test_the_command_is_shown_and_loads_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0 and "flame-train plot" in capsys.readouterr().out
    assert main(["plot", "-h"]) == 0 and "--metric" in capsys.readouterr().out
    check = "import sys, flame.cli.train as t; t.main(['plot', 'x']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
