"""What people see of a run: one live line on a terminal, and the options that change it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flame.train.__main__ import main as flame_train
from tests.runs import arguments, read_metrics
from tests.terminals import Screen, terminal


def screen_of(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> Screen:
    """Train with a terminal as stderr."""
    with terminal() as (file, screen), monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        assert flame_train(argv) == 0
    return screen


def test_a_terminal_has_a_live_line_and_a_plain_one_has_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    options = {"training__steps": 6, "metrics__log_freq": 2, "metrics__peak_tflops": 1, "validation__freq": 4}
    options |= {"checkpoint__enable_checkpoint": "false", "validation__dataset": folder / "web"}
    live = screen_of(monkeypatch, arguments(folder, tmp_path / "live", **options))
    assert [line["step"] for line in read_metrics(tmp_path / "live")] == [1, 2, 4, 6]
    assert all(line["mfu(%)"] > 0 for line in read_metrics(tmp_path / "live"))
    kept = [line[9:].split()[1] for line in live.lines() if line[9:].startswith("step ")]
    assert kept == ["4/6", "6/6"], "steps with a validation, and the last, stay; the others pass in the live line"
    for step in (1, 2, 4, 6):
        assert f"\033[36mstep {step}/6\033[0m  " in live.text and " < " in live.text
    live_steps = re.findall(r"\033\[K\033\[36mstep (\d)/6", live.text)
    assert live_steps == sorted(live_steps), "none is drawn again below a later one"
    assert live.lines()[-1] == "" and "finished" in live.lines()[-2]

    options |= {"metrics__disable_color_printing": "true", "metrics__log_freq": 3, "metrics__peak_tflops": 2}
    plain = screen_of(monkeypatch, arguments(folder, tmp_path / "plain", **options))
    assert "\033" not in plain.text and "\r" not in plain.text
    assert [line["step"] for line in read_metrics(tmp_path / "plain")] == [1, 3, 4, 6]
    assert [line[9:].split()[1] for line in plain.lines() if line[9:].startswith("step ")] == [
        f"{step}/6" for step in (1, 3, 4, 6)
    ]
    ratios = [line["mfu(%)"] / line["tflops"] for line in read_metrics(tmp_path / "plain")]
    assert ratios == pytest.approx([100 / 2] * 4)
