"""Stopped by a signal, a run saves one complete checkpoint, says so, and goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import PROJECT, arguments, losses_and_norms, make_training_folder, run_training

STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "straight"
    run_training(arguments(folder, run, training__steps=STEPS))
    return run


def start(argv: list[str], *, ranks: int, command: tuple[str, ...] = ("flame.cli.train",)) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen([sys.executable, "-m", *command, *argv], env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen[str], step: int) -> list[str]:
    """Read the log until a step is told."""
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if f"step {step:>{len(str(STEPS))}}/{STEPS}" in line:
            return lines
    raise AssertionError("".join(lines))


def status(run: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads((run / "status.json").read_text())
    return value


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(1, signal.SIGTERM), (1, signal.SIGUSR1), (2, signal.SIGTERM)],
    ids=["TERM", "USR1", "launcher"],
)
def test_a_signal_saves_and_a_restart_goes_on(
    folder: Path, straight: Path, tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    batch = {"training__batch_size": 2 // ranks, "training__steps": STEPS}
    process = start(arguments(folder, run, **batch), ranks=ranks)
    log = wait_for_step(process, 4)
    process.send_signal(number)
    process.send_signal(number)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 75, "".join(log) + rest
    (checkpoint,) = (run / "checkpoint").glob("step-*")
    told = status(run)
    assert told["state"] == "preempted" and told["reason"] == number.name
    assert told["checkpoint"] == f"checkpoint/{checkpoint.name}" == f"checkpoint/step-{told['step']}"
    assert 4 <= int(str(told["step"])) < STEPS
    run_training(arguments(folder, run, **batch), ranks=ranks)
    assert status(run)["state"] == "finished"
    expected, found = losses_and_norms(straight), losses_and_norms(run)
    if ranks == 1:
        assert found == expected
    else:
        assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], rel=1e-5)


def test_ctrl_c_stops_at_once_without_a_save(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(arguments(folder, run, training__steps=STEPS), ranks=1)
    wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert not (run / "checkpoint").exists() or not list((run / "checkpoint").glob("step-*"))


def test_a_rank_that_is_killed_stops_the_others(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(arguments(folder, run, training__batch_size=1, training__steps=STEPS), ranks=2)
    log = wait_for_step(process, 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 1, "".join(log) + rest
    assert "local rank 1 was killed by SIGKILL" in rest
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a rank outlived its launcher"


def test_bare_torchrun_trains_too(folder: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, training__batch_size=1, training__steps=STEPS)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flame.train")
    process = start(argv, ranks=1, command=launcher)
    _, log = process.communicate(timeout=240)
    assert process.returncode == 0, log[-3000:]
    assert [loss for _, loss, _ in losses_and_norms(run)] == pytest.approx(
        [loss for _, loss, _ in losses_and_norms(straight)], rel=1e-5
    )
