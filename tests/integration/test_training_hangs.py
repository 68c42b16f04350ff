"""How long ranks wait for one another; one that hangs is named, and its stack tells where it stands."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flame.train import checkpoint, loop
from flame.train import step as training_step
from flame.train.__main__ import main
from flame.train.checkpoint_files import find_damage
from flame.train.run import read_status
from flame.train.watchdog import INIT_TIMEOUT, SHUTDOWN_TIMEOUT, TRAIN_TIMEOUT, Watchdog
from tests.faults import in_ranks, signal_within
from tests.runs import arguments, read_metrics, start_training


def test_a_rank_that_hangs_is_named_with_its_stack(folder: Path, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    # Without the shorter timeout after the first step, the ranks would wait for 300 seconds.
    argv = arguments(folder, run, training__batch_size=1, comm__train_timeout_seconds=6)
    process = start_training(argv, ranks=2, variables=in_ranks(notes, hang_in=2))
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("flame-train: "):  # it listens to no signal that asks
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((notes / "rank-1.pid").read_text()), signal.SIGKILL)
    assert process.wait(timeout=60) == 1, "".join(lines)
    told = next(line for line in lines if line.startswith("flame-train: "))
    assert "this rank waited 6 s for another in a collective" in told and "in step 2" in told
    assert "rank 1 is not in a collective, but in sleep_for_ever (" in told and "rank 0 " not in told
    assert "stacks/rank-N.txt" in told and "--comm.train_timeout_seconds" in told
    assert any("step 2 takes" in line and "rank 1 is not in a collective" in line for line in lines), "before the end"
    assert told.strip().removeprefix("flame-train: ") == read_status(run)["reason"]
    assert [line["step"] for line in read_metrics(run)] == [1]
    stacks = (run / "stacks" / "rank-1.txt").read_text()
    assert "in sleep_for_ever" in stacks and "in train_step" in stacks and "in run_steps" in stacks
    assert "torch/distributed/" in (run / "stacks" / "rank-0.txt").read_text()


@pytest.mark.usefixtures("handlers_kept")
def test_ranks_wait_long_only_until_the_first_step_of_each_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    begin = Watchdog.begin

    def begun(watchdog: Watchdog, name: str, timeout: str) -> None:
        told.append((name, timeout))
        begin(watchdog, name, timeout)

    monkeypatch.setattr(Watchdog, "begin", begun)
    monkeypatch.setattr(loop, "set_collective_timeout", lambda world, seconds: told.append(seconds))
    argv = arguments(folder, tmp_path / "run", training__steps=1000, comm__train_timeout_seconds=77)  # never ends
    with pytest.MonkeyPatch.context() as patch:  # a signal while the first step works, as when it compiles
        signal_within(patch, training_step, "backward")
        assert main(argv) == 75
    start, end = ("the start", INIT_TIMEOUT), ("the end", SHUTDOWN_TIMEOUT)
    assert told == [start, ("step 1", INIT_TIMEOUT), 77, ("step 2", TRAIN_TIMEOUT), end]
    (saved,) = (tmp_path / "run" / "checkpoint").iterdir()
    assert saved.name == "step-1" and find_damage(saved, check_bytes=True) is None
    told.clear()
    with pytest.MonkeyPatch.context() as patch:  # and while a save is written beside training
        signal_within(patch, checkpoint, "save")
        assert main([*argv, "--checkpoint.async_mode=async", "--checkpoint.interval=3"]) == 75
    assert told[:4] == [start, ("step 2", INIT_TIMEOUT), 77, ("step 3", TRAIN_TIMEOUT)]
    status = read_status(tmp_path / "run")
    assert status["state"] == "preempted" and status["step"] >= 3
    saves = {path.name: path for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert saves.keys() == {"step-1", "step-3", f"step-{status['step']}"}
    assert all(find_damage(path, check_bytes=True) is None for path in saves.values())
