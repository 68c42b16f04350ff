"""What kills, full disks and lost files do to a run's checkpoints: fewer steps, told loudly; never a mixed state."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flame.train.__main__ import main
from flame.train.checkpoint_files import find_damage
from flame.train.run import read_status
from tests.processes import small_disk
from tests.runs import (
    PROJECT,
    arguments,
    losses_and_norms,
    read_metrics,
    read_segments,
    run_training,
)

pytestmark = pytest.mark.usefixtures("handlers_kept")
OPTIONS = {"training__steps": 6, "checkpoint__interval": 2}


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, and the checkpoints of steps 2, 4 and 6."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    assert main(arguments(folder, run, **OPTIONS)) == 0
    return run


def run_id(run: Path) -> set[str]:
    return {segment["run_id"] for segment in read_segments(run)}


def test_killed_within_a_save_it_goes_on_from_the_one_before(folder: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, **OPTIONS)
    kill = ["-m", "tests.kills", "train", "step-4.tmp/complete.json.tmp", *argv]  # all its tensors are written
    result = subprocess.run([sys.executable, *kill], env=os.environ | {"PYTHONPATH": str(PROJECT)}, check=False)
    assert result.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2", "step-4.tmp"]
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]
    assert read_status(run)["checkpoint"] == "checkpoint/step-2"
    before = run_id(run)
    assert main(argv) == 0
    assert losses_and_norms(run) == losses_and_norms(straight), "each step once, and as if nothing had happened"
    assert run_id(run) == before and len(before) == 1
    abandoned = (run / "metrics.abandoned.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in abandoned] == [3, 4]
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]


def test_killed_before_any_change_to_the_disk_a_save_never_mixes_two_states(tmp_path: Path) -> None:
    """Every file that a save opens, makes, renames or removes is a moment to die at; retention's too."""
    command = [sys.executable, "-m", "tests.kills", "saves", str(tmp_path)]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["moments"] > 20 and set(told["chosen"]) == {"1", "2"}, told


DAMAGES: dict[str, Callable[[Path], object]] = {
    "__0_0.distcp is absent": lambda path: (path / "__0_0.distcp").unlink(),
    ".metadata is absent": lambda path: (path / ".metadata").unlink(),
    "__0_0.distcp has 1000 bytes": lambda path: os.truncate(path / "__0_0.distcp", 1000),
    "complete.json is absent": lambda path: (path / "complete.json").unlink(),
    "cannot be understood": lambda path: (path / "complete.json").write_text("{"),
}


@pytest.mark.parametrize("told", DAMAGES)
def test_a_damaged_latest_is_told_and_the_one_before_taken(
    folder: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], told: str
) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    argv = arguments(folder, run, **OPTIONS)
    DAMAGES[told](run / "checkpoint" / "step-6")
    assert main(argv) == 0
    log = capfd.readouterr().err
    assert "step-6 is damaged and is passed over" in log and told in log
    assert "resumed from" in log and "step 4," in log
    assert losses_and_norms(run) == losses_and_norms(straight)
    assert find_damage(run / "checkpoint" / "step-6", check_bytes=True) is None
    assert len(list(run.glob("checkpoint/abandoned-*/step-6"))) == 1, "what was damaged is kept"


def test_with_every_checkpoint_damaged_a_run_does_not_start_over(
    folder: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    for damage, step in zip(DAMAGES.values(), (2, 4, 6), strict=False):
        damage(run / "checkpoint" / f"step-{step}")
    before = (run / "metrics.jsonl").read_bytes()
    refusals = {None: "step-2, step-4, step-6", 4: ".metadata is absent", 3: "no checkpoint of step 3"}
    for load_step, told in refusals.items():
        argv = arguments(folder, run, **OPTIONS, checkpoint__load_step=-1 if load_step is None else load_step)
        assert main(argv) == 1
        paragraph = capfd.readouterr().err.strip().splitlines()[-1]
        assert paragraph.startswith("flame-train: ") and told in paragraph
    assert (run / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]


def test_a_disk_with_room_for_one_checkpoint_and_a_half(folder: Path, straight: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (straight / "checkpoint" / "step-6").rglob("*") if path.is_file())
    run = tmp_path / "run"
    argv = arguments(folder, run, **OPTIONS, training__batch_size=1)
    with small_disk(run / "checkpoint", size * 3 // 2):
        result = run_training(argv, ranks=2, check=False)
        assert result.returncode == 1, result.stderr[-2000:]
        assert "no space left on the device" in result.stderr and "step-4" in result.stderr
        assert "Traceback" not in result.stderr
        told = read_status(run)
        assert (told["state"], told["checkpoint"]) == ("failed", "checkpoint/step-2")
        assert "no space left" in told["reason"]
        assert [path.name for path in (run / "checkpoint").iterdir()] == ["step-2"]
        assert find_damage(run / "checkpoint" / "step-2", check_bytes=True) is None
        grow = ["mount", "-o", f"remount,size={size * 10}", str(run / "checkpoint")]
        subprocess.run(grow, check=True)
        assert main(arguments(folder, run, **OPTIONS)) == 0, "it goes on where there is room, on one rank too"
    assert [loss for _, loss, _ in losses_and_norms(run)] == pytest.approx(
        [loss for _, loss, _ in losses_and_norms(straight)], rel=1e-5
    )
