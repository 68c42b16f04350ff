"""Stopped by a signal, a run saves one complete checkpoint, says so, and goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flame.train import checkpoint, loop
from flame.train.__main__ import main
from flame.train.checkpoint_files import find_damage
from tests.faults import in_ranks, is_held, samples_trained, signal_before_step
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


def start(
    argv: list[str],
    *,
    ranks: int,
    command: tuple[str, ...] = ("flame.cli.train",),
    faults: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)} | (faults or {})
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
    [(1, signal.SIGTERM), (2, signal.SIGUSR1)],
    ids=["TERM", "USR1 to the launcher"],
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


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize("during", ["validation", "a save"])
def test_signals_in_the_middle_of_other_work_wait_for_its_end(
    folder: Path, straight: Path, tmp_path: Path, during: str
) -> None:
    run, stopped = tmp_path / "run", 3 if during == "validation" else 4
    validation = {"validation__dataset": f"{folder / 'web'}@val", "validation__freq": 3}
    argv = arguments(folder, run, training__steps=STEPS, **validation)

    with pytest.MonkeyPatch.context() as patch:
        signal_within(patch, *((loop, "validate") if during == "validation" else (checkpoint, "save")))
        assert main([*argv, "--checkpoint.interval=4"]) == 75
    told = status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", stopped, "SIGUSR1")
    (saved,) = (run / "checkpoint").iterdir()
    assert saved.name == f"step-{stopped}" and find_damage(saved, check_bytes=True) is None

    with pytest.MonkeyPatch.context() as patch:  # and now within the save that a signal asked for
        signal_before_step(patch, 8, signal.SIGTERM, first_step=stopped + 1)
        signal_within(patch, checkpoint, "save")
        assert main(argv) == 75
    told = status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", 7, "SIGTERM")
    assert find_damage(run / "checkpoint" / "step-7", check_bytes=True) is None

    assert main(argv) == 0
    assert losses_and_norms(run) == losses_and_norms(straight)
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == sorted([saved.name, "step-60", "step-7"])


def signal_within(patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Make a function begin with two signals to its own process."""
    original = getattr(module, name)

    def disturbed(*arguments: Any, **named: Any) -> Any:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    patch.setattr(module, name, disturbed)


LAUNCHERS = {
    "flame-train": ("flame.cli.train",),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flame.train"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_save_one_step_and_a_second_signal_in_the_save_changes_nothing(
    folder: Path, straight: Path, tmp_path: Path, launcher: str
) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    faults = in_ranks(notes, hold_saves=True)
    argv = arguments(folder, run, training__batch_size=1, training__steps=STEPS)
    for rank in (0, 1):
        os.mkfifo(notes / f"rank-{rank}.fifo")
    process = start(argv, ranks=2, command=LAUNCHERS[launcher], faults=faults)
    log = wait_for_step(process, 4)
    # torchrun kills its ranks after a signal to itself: there the ranks are signalled, here the launcher is.
    ranks = [int((notes / f"rank-{rank}.pid").read_text()) for rank in (0, 1)]
    targets = [process.pid] if launcher == "flame-train" else ranks
    os.kill(targets[-1], signal.SIGTERM)  # one rank is enough: all agree
    until(lambda: all((notes / f"rank-{rank}.saving").exists() for rank in (0, 1)), process)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for target in targets:
            os.kill(target, number)
    for rank in (0, 1):
        (notes / f"rank-{rank}.fifo").write_text("go on")
    _, rest = process.communicate(timeout=120)
    text = "".join(log) + rest
    if launcher == "flame-train":
        assert process.returncode == 75, text
    else:
        assert process.returncode == 1, "torchrun has no other code for it"
        assert re.search(r"exitcode\s*: 75", text), text
    steps = {(notes / f"rank-{rank}.saving").read_text() for rank in (0, 1)}
    told = status(run)
    assert told["state"] == "preempted" and steps == {str(told["step"])}, told
    (saved,) = (run / "checkpoint").iterdir()
    assert saved.name == f"step-{told['step']}" and find_damage(saved, check_bytes=True) is None
    trained = samples_trained(notes / "rank-0.samples", notes / "rank-1.samples")
    assert [sample for step in trained for sample in step] == list(range(2 * int(str(told["step"]))))
    assert [loss for _, loss, _ in losses_and_norms(run)] == pytest.approx(
        [loss for _, loss, _ in losses_and_norms(straight)][: len(trained)], rel=1e-5
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_a_signal_to_ranks_that_only_start_is_answered_before_step_1(folder: Path, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    faults = in_ranks(notes, hold_start=True)
    for rank in (0, 1):
        os.mkfifo(notes / f"rank-{rank}.fifo")
    argv = arguments(folder, run, training__batch_size=1, training__steps=STEPS)
    process = start(argv, ranks=2, faults=faults)
    pids = [notes / "rank-0.pid", notes / "rank-1.pid"]
    until(lambda: all(pid.exists() and pid.read_text() for pid in pids), process)
    process.send_signal(signal.SIGTERM)  # the ranks have not imported anything yet
    until(lambda: all(is_held(int(pid.read_text()), signal.SIGTERM) for pid in pids), process)
    for rank in (0, 1):
        (notes / f"rank-{rank}.fifo").write_text("go on")
    _, log = process.communicate(timeout=120)
    assert process.returncode == 75, log
    told = status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", 0, "SIGTERM")


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
