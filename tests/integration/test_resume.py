"""Stopped and resumed, a run is the run that was never stopped: losses and gradient norms to the last bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import PROJECT, arguments, losses_and_norms, make_training_folder, run_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_are_ten_and_ten_are_seven_and_one_and_twelve(folder: Path, tmp_path: Path, ranks: int) -> None:
    straight = tmp_path / "straight"
    run_training(arguments(folder, straight), ranks=ranks)
    expected = losses_and_norms(straight)
    assert [step for step, _, _ in expected] == list(range(1, 21))
    assert expected[-1][1] < expected[0][1]
    for stops in ([10, 20], [7, 8, 20]):
        run = tmp_path / "-".join(map(str, stops))
        for stop in stops:
            # training.steps shapes the schedule, so a stop is asked for by a signal to the run itself.
            stop_after(folder, run, stop, ranks=ranks)
        assert losses_and_norms(run) == expected


def stop_after(folder: Path, run: Path, step: int, *, ranks: int) -> None:
    """Go on with a run until `step` is saved, and then kill it with SIGKILL: launcher and ranks."""
    argv = arguments(folder, run, checkpoint__interval=step)
    if step == 20:
        run_training(argv, ranks=ranks)
        return
    environment = os.environ | {
        "NGPU": str(ranks),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(PROJECT),
    }
    command = [sys.executable, "-m", "flame.cli.train", *argv]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if f"saved {run / 'checkpoint' / f'step-{step}'}" in line:
                process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "".join(lines)
