"""`checkpoint.exclude_from_loading`: what is left out begins anew, is told, and is left out once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flame.train.__main__ import main
from tests.faults import signal_before_step
from tests.runs import arguments, losses_and_norms, read_metrics, read_segments, refused, tensors_of
from tests.tiny_states import differences

STEPS = {"training__steps": 5, "checkpoint__interval": 3, "lr_scheduler__warmup_steps": 1, "optimizer__lr": 0.01}


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "straight"
    assert main(arguments(folder, run, **STEPS)) == 0
    return run


def branch(folder: Path, straight: Path, run: Path, parts: str, **others: Any) -> list[str]:
    """A run from step 3 of `straight`, without these parts."""
    chosen = {
        "checkpoint__initial_load_path": straight / "checkpoint" / "step-3",
        "checkpoint__initial_load_model_weights_only": "false",
        "checkpoint__exclude_from_loading": parts,
    }
    return arguments(folder, run, **STEPS, **chosen, **others)


@pytest.mark.parametrize(
    ("parts", "first_step", "same_first_loss"),
    [
        ("optimizer", 4, True),
        ("lr_scheduler", 4, True),
        ("model", 4, False),
        ("dataloader", 4, False),
        ("train_state,optimizer", 1, False),
    ],
)
def test_what_is_left_out_begins_anew(
    folder: Path,
    straight: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    parts: str,
    first_step: int,
    same_first_loss: bool,
) -> None:
    run = tmp_path / "run"
    assert main(branch(folder, straight, run, parts)) == 0
    log = capsys.readouterr().err
    for part in parts.split(","):
        row = next(line for line in log.splitlines() if line.startswith(f"  {part} "))
        assert ("never kept" if part == "lr_scheduler" else "left out") in row
    assert f"branching off from {straight / 'checkpoint' / 'step-3'}: step " in log
    lines = losses_and_norms(run)
    assert [step for step, _, _ in lines] == list(range(first_step, 6))
    expected = losses_and_norms(straight)[3:]
    assert (lines[0][1:] == expected[0][1:]) == same_first_loss
    assert (lines == expected) == (parts == "lr_scheduler")
    (segment,) = read_segments(run)
    assert segment["data_segment"] == int(parts == "dataloader")
    assert segment["consumed_samples"] == (0 if first_step == 1 or parts == "dataloader" else 6)
    if parts == "model":
        assert lines[0][1] == pytest.approx(losses_and_norms(straight)[0][1], abs=0.05), "weights as they began"
    if "train_state" in parts:
        assert read_metrics(run)[-1]["consumed_samples"] == 10


@pytest.mark.usefixtures("handlers_kept")
def test_the_same_command_leaves_out_once(
    folder: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "whole", tmp_path / "stopped"
    for run in runs:
        shutil.copytree(straight, run)
        argv = arguments(folder, run, **{**STEPS, "training__steps": 9}, checkpoint__exclude_from_loading="optimizer")
        if run is runs[1]:
            with pytest.MonkeyPatch.context() as patch:
                signal_before_step(patch, 8, first_step=6)
                assert main(argv) == 75
            capsys.readouterr()
        assert main(argv) == 0
    assert "step-7 is loaded whole" in capsys.readouterr().err
    assert losses_and_norms(runs[0]) == losses_and_norms(runs[1])
    assert not differences(*(tensors_of(run / "checkpoint" / "step-9") for run in runs))


def test_what_cannot_be_left_out_is_refused(
    folder: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(run: Path, parts: str, **others: Any) -> list[str]:
        return arguments(folder, run, **{**STEPS, **others}, checkpoint__exclude_from_loading=parts)

    run = tmp_path / "run"
    refused(capsys, asked(run, "optimiser"), 2, "cannot contain 'optimiser' (expected model, optimizer, lr_scheduler")
    refused(capsys, asked(run, "model", checkpoint__initial_load_path=straight), 2, "leaves nothing of")
    shutil.copytree(straight, run)
    refused(capsys, asked(run, "train_state", training__steps=9), 2, "again at step 0", "another job.dump_folder")
    other = {**STEPS, "training__steps": 9, "optimizer__name": "SGD"}
    refused(
        capsys,
        arguments(folder, run, **other),
        1,
        "saved with another kind of optimizer",
        "exp_avg, exp_avg_sq, step; expected momentum_buffer",
        "exclude_from_loading optimizer",
    )
    assert main(arguments(folder, run, **other, checkpoint__exclude_from_loading="optimizer")) == 0
