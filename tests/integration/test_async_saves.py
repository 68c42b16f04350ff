"""Checkpoints that are written beside training are those that training would have waited for, to the last bit."""

from __future__ import annotations

import errno
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flame.train import checkpoint_saver
from flame.train.__main__ import main
from flame.train.checkpoint import write_checkpoint
from flame.train.checkpoint_tensors import StoredModel
from flame.train.run import read_status
from tests.promises import CPUS, ranks_resume_from_what_was_saved_beside, same_checkpoints
from tests.runs import arguments, losses_and_norms, read_metrics, tensors_of
from tests.tiny_states import differences

# Updates so large that a checkpoint of a step too late or too early differs in every tensor.
OPTIONS: dict[str, Any] = {
    "training__steps": 5,
    "training__batch_size": 1,
    "optimizer__lr": 0.3,
    "lr_scheduler__warmup_steps": 0,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest_k": 0,
}


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "straight"
    assert main(arguments(folder, run, **OPTIONS)) == 0
    return run


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_save_at_every_step_beside_large_updates(folder: Path, straight: Path, tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    assert main(arguments(folder, run, **OPTIONS, checkpoint__async_mode=mode)) == 0
    assert losses_and_norms(run) == losses_and_norms(straight)
    same_checkpoints(run, straight, range(1, 6))
    # What a save takes is told by the step after it.
    told = [(line["time_metrics/save(s)"], line["time_metrics/save_stall(s)"]) for line in read_metrics(run)]
    assert told[0] == (None, 0.0) and all(stalled > 0 for _, stalled in told[1:])
    assert all(seconds is None or seconds > 0 for seconds, _ in told) and any(seconds for seconds, _ in told)
    assert read_status(run)["state"] == "finished" and read_status(run)["checkpoint"] == "checkpoint/step-5"


def test_a_slow_save_holds_what_was_staged_and_the_next_one_waits(
    folder: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, order = threading.Semaphore(0), []

    def slow(*args: Any, **kwargs: Any) -> Path:
        step = kwargs["state"].step
        order.append(("begun", step))
        if threading.current_thread().name == "flame-save":
            assert updates.acquire(timeout=60), "training went on beside it"
        path = write_checkpoint(*args, **kwargs)
        order.append(("written", step))
        return path

    update = torch.optim.AdamW.step

    def counted(self: torch.optim.AdamW, *args: Any) -> Any:
        result = update(self, *args)
        updates.release()
        return result

    monkeypatch.setattr(checkpoint_saver, "write_checkpoint", slow)
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    # The save of step 1 is written only after the update of step 2 (its permit; step 1's own is taken here).
    run = tmp_path / "run"
    updates_of_step_1 = threading.Thread(target=updates.acquire)
    updates_of_step_1.start()
    assert main(arguments(folder, run, **OPTIONS, checkpoint__async_mode="async")) == 0
    updates_of_step_1.join()
    assert order == [(what, step) for step in range(1, 6) for what in ("begun", "written")], "one at a time"
    same_checkpoints(run, straight, range(1, 6))


def test_a_save_that_fails_beside_training_stops_it_with_the_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any, **kwargs: Any) -> Path:
        if kwargs["state"].step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_checkpoint(*args, **kwargs)

    monkeypatch.setattr(checkpoint_saver, "write_checkpoint", full)
    run = tmp_path / "run"
    assert main(arguments(folder, run, **OPTIONS, checkpoint__async_mode="async")) == 1
    assert "No space left" in capsys.readouterr().err.splitlines()[-1]
    assert read_status(run)["state"] == "failed" and read_status(run)["checkpoint"] == "checkpoint/step-1"
    assert [path.name for path in (run / "checkpoint").iterdir()] == ["step-1"]


def test_two_ranks_resume_from_what_was_saved_beside(folder: Path, tmp_path: Path) -> None:
    ranks_resume_from_what_was_saved_beside(folder, tmp_path, CPUS)


def test_the_interval_may_be_seconds_of_rank_0(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock on which every look takes a second, however fast this machine is.
    ticks = itertools.count()
    monkeypatch.setattr(checkpoint_saver.time, "monotonic", lambda: float(next(ticks)))
    seconds = OPTIONS | {"checkpoint__interval_type": "seconds"}
    assert main(arguments(folder, tmp_path / "often", **seconds)) == 0
    assert len(list((tmp_path / "often" / "checkpoint").iterdir())) == 5
    assert main(arguments(folder, tmp_path / "seldom", **(seconds | {"checkpoint__interval": 10**6}))) == 0
    assert [path.name for path in (tmp_path / "seldom" / "checkpoint").iterdir()] == ["step-5"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_last_save_may_hold_weights_only(
    folder: Path, straight: Path, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = OPTIONS | {"checkpoint__model_weights_only": "true", "checkpoint__async_mode": mode}
    assert main(arguments(folder, run, **options)) == 0
    stored = StoredModel(run / "checkpoint" / "step-5", prefix="")
    assert stored.tensors and not any(name.startswith("optimizer.") for name in stored.tensors)
    last, before = (tensors_of(path / "checkpoint" / "step-5", "model.") for path in (run, straight))
    assert differences(last, before) == []
    same_checkpoints(run, straight, range(1, 5))
    # The finished run stays finished; it is made no longer from there, but from the step before.
    assert main(arguments(folder, run, **options)) == 0
    longer = options | {"training__steps": 6}
    assert main(arguments(folder, run, **longer)) == 1
    assert "weights only" in capsys.readouterr().err
    assert main(arguments(folder, run, **longer, checkpoint__load_step=4)) == 0
