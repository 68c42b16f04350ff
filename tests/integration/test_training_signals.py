"""Stopped by a signal, a run saves one complete checkpoint, says so, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.callback import callback_handler, on_compile_start

from flame.train import checkpoint, loop
from flame.train.__main__ import main
from flame.train.checkpoint_files import find_damage
from flame.train.run import read_status
from tests.faults import in_ranks, is_held, signal_before_step, signal_within
from tests.processes import until
from tests.promises import (
    CPUS,
    SIGNALLED_STEPS,
    a_killed_rank_stops_the_others,
    ranks_save_one_step_whatever_signals_come,
    wait_for_step,
)
from tests.runs import FLAME_TRAIN, TORCHRUN, arguments, losses_and_norms, start_training


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "straight"
    assert main(arguments(folder, run, training__steps=SIGNALLED_STEPS)) == 0
    return run


@pytest.mark.usefixtures("handlers_kept")
def test_a_signal_saves_and_a_restart_goes_on(folder: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, training__steps=SIGNALLED_STEPS)
    process = start_training(argv)
    log = wait_for_step(process, 4)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 75, "".join(log) + rest
    (saved,) = (run / "checkpoint").glob("step-*")
    told = read_status(run)
    assert told["state"] == "preempted" and told["reason"] == "SIGTERM"
    assert told["checkpoint"] == f"checkpoint/{saved.name}" == f"checkpoint/step-{told['step']}"
    assert 4 <= told["step"] < SIGNALLED_STEPS
    assert main(argv) == 0
    assert read_status(run)["state"] == "finished"
    assert losses_and_norms(run) == losses_and_norms(straight)


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize("during", ["validation", "a save"])
def test_signals_in_the_middle_of_other_work_wait_for_its_end(
    folder: Path, straight: Path, tmp_path: Path, during: str
) -> None:
    run, stopped = tmp_path / "run", 3 if during == "validation" else 4
    validation = {"validation__dataset": f"{folder / 'web'}@val", "validation__freq": 3}
    argv = arguments(folder, run, training__steps=SIGNALLED_STEPS, **validation)

    with pytest.MonkeyPatch.context() as patch:
        signal_within(patch, *((loop, "validate") if during == "validation" else (checkpoint, "save")))
        assert main([*argv, "--checkpoint.interval=4"]) == 75
    told = read_status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", stopped, "SIGUSR1")
    (saved,) = (run / "checkpoint").iterdir()
    assert saved.name == f"step-{stopped}" and find_damage(saved, check_bytes=True) is None

    with pytest.MonkeyPatch.context() as patch:  # and now within the save that a signal asked for
        signal_before_step(patch, 8, signal.SIGTERM, first_step=stopped + 1)
        signal_within(patch, checkpoint, "save")
        assert main(argv) == 75
    told = read_status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", 7, "SIGTERM")
    assert find_damage(run / "checkpoint" / "step-7", check_bytes=True) is None

    assert main(argv) == 0
    assert losses_and_norms(run) == losses_and_norms(straight)
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == sorted([saved.name, "step-60", "step-7"])


@pytest.mark.usefixtures("handlers_kept")
def test_a_signal_while_torch_compiles_is_answered_after_the_step(folder: Path, tmp_path: Path) -> None:
    run, compiled = tmp_path / "run", 0

    def signal_once(*_: object) -> None:
        nonlocal compiled
        compiled += 1
        if compiled == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    argv = arguments(folder, run, training__steps=3, training__compile="true")
    on_compile_start(signal_once)
    try:
        assert main(argv) == 75
    finally:
        callback_handler.remove_start_callback(signal_once)
        torch.compiler.reset()
    assert compiled >= 1
    told = read_status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", 1, "SIGTERM")
    (saved,) = (run / "checkpoint").iterdir()
    assert saved.name == "step-1" and find_damage(saved, check_bytes=True) is None


@pytest.mark.parametrize(
    ("launcher", "first"),
    [(FLAME_TRAIN, signal.SIGUSR1), (TORCHRUN, signal.SIGTERM)],
    ids=["flame-train", "torchrun"],
)
def test_two_ranks_save_one_step_and_a_second_signal_in_the_save_changes_nothing(
    folder: Path, straight: Path, tmp_path: Path, launcher: Sequence[str], first: signal.Signals
) -> None:
    losses = [loss for _, loss, _ in losses_and_norms(straight)]
    ranks_save_one_step_whatever_signals_come(folder, tmp_path, losses, CPUS, launcher=launcher, first=first)


def test_a_signal_to_ranks_that_only_start_is_answered_before_step_1(folder: Path, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    faults = in_ranks(notes, hold_start=True)
    for rank in (0, 1):
        os.mkfifo(notes / f"rank-{rank}.fifo")
    argv = arguments(folder, run, training__batch_size=1, training__steps=SIGNALLED_STEPS)
    process = start_training(argv, ranks=2, variables=faults)
    pids = [notes / "rank-0.pid", notes / "rank-1.pid"]
    assert until(lambda: all(pid.exists() and pid.read_text() for pid in pids), process)
    process.send_signal(signal.SIGTERM)  # the ranks have not imported anything yet
    assert until(lambda: all(is_held(int(pid.read_text()), signal.SIGTERM) for pid in pids), process)
    for rank in (0, 1):
        (notes / f"rank-{rank}.fifo").write_text("go on")
    _, log = process.communicate(timeout=120)
    assert process.returncode == 75, log
    told = read_status(run)
    assert (told["state"], told["step"], told["reason"]) == ("preempted", 0, "SIGTERM")


def test_ctrl_c_stops_at_once_without_a_save(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_training(arguments(folder, run, training__steps=SIGNALLED_STEPS))
    wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert not (run / "checkpoint").exists() or not list((run / "checkpoint").glob("step-*"))


def test_a_rank_that_is_killed_stops_the_others(folder: Path, tmp_path: Path) -> None:
    a_killed_rank_stops_the_others(folder, tmp_path)
