"""The demo's training run: started, killed by SIGKILL half-way, started again by the same command, and checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_commands import DemoError, announce, environment, say
from demo_plot import read_metrics, train_losses, validation_losses

_POLL_SECONDS = 0.02
_EQUAL_ENOUGH = 1e-3
_TAIL_BYTES = 1 << 18  # holds many lines of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Killed:
    """Where the run was when it was killed: the last step that it logged, and its last complete checkpoint."""

    step: int
    checkpoint: int


def train_until_killed(command: Sequence[object], run: Path, *, after: int, lost: int) -> Killed:
    """Start `command` in a process group of its own and kill the group once a checkpoint and later steps are there.

    The checkpoint is the one of step `after`; the last logged step is `lost` or more steps later, so that the resumed
    run trains them again. Raises `DemoError` if the run ends first.
    """
    process = subprocess.Popen(announce(command), env=environment(), start_new_session=True)
    try:
        while last_step(run) < after + lost or last_checkpoint(run) < after:
            if process.poll() is not None:
                raise DemoError(f"`flame-train` exited {process.returncode} by itself, before the kill")
            time.sleep(_POLL_SECONDS)
    finally:
        # Only while it is ours to wait for: its number cannot have gone to another process yet.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != -signal.SIGKILL:
        raise DemoError(f"`flame-train` exited {process.returncode} before SIGKILL reached it")
    killed = Killed(step=last_step(run), checkpoint=last_checkpoint(run))
    say(f"    SIGKILL to process group {process.pid} after step {killed.step}")
    return killed


def check_resumed(run: Path, killed: Killed, *, steps: int) -> str:
    """Raise `DemoError` unless the second start went on from the checkpoint; say how the repeated steps compare."""
    segments = [json.loads(line) for line in (run / "segments.jsonl").read_text(encoding="utf-8").splitlines()]
    started = [segment["step"] for segment in segments]
    if started != [0, killed.checkpoint] or killed.checkpoint == 0:
        raise DemoError(f"the two starts began at steps {started}, not at 0 and at checkpoint {killed.checkpoint}")
    train = train_losses(read_metrics(run / "metrics.jsonl"))
    if list(train) != sorted(train) or max(train) != steps:
        raise DemoError(f"metrics.jsonl does not lead, step by step, to step {steps}: {list(train)}")
    lost = train_losses(read_metrics(run / "metrics.abandoned.jsonl"))
    repeated = {step: abs(train[step] - loss) for step, loss in lost.items() if step in train}
    if not repeated:
        raise DemoError("no logged step was trained twice, so nothing shows that the resumed run is the same run")
    worst = max(repeated.values())
    if worst > _EQUAL_ENOUGH:
        raise DemoError(f"steps {sorted(repeated)} were trained twice, and their losses differ by up to {worst:.3g}")
    return f"steps {min(repeated)} to {max(repeated)} were trained twice: " + (
        f"all {len(repeated)} logged losses are equal to the last bit" if worst == 0 else f"losses within {worst:.1e}"
    )


def check_validation(run: Path) -> dict[str, tuple[float, float]]:
    """Return (first, last) validation loss by set. Raises `DemoError` unless each fell."""
    losses = validation_losses(read_metrics(run / "metrics.jsonl"))
    if not losses:
        raise DemoError("metrics.jsonl holds no validation loss")
    falls = {name: (by_step[min(by_step)], by_step[max(by_step)]) for name, by_step in losses.items()}
    for name, (first, last) in falls.items():
        if not last < first:
            raise DemoError(f"the validation loss of {name} did not fall: {first:.4f} at first, {last:.4f} at the end")
    return falls


def last_step(run: Path) -> int:
    """Return the last step that metrics.jsonl holds, or 0."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            whole, _, _ = file.read().rpartition(b"\n")  # a line that is being written has no end yet
    except FileNotFoundError:
        return 0
    step: int = json.loads(whole.rpartition(b"\n")[2])["step"] if whole else 0
    return step


def last_checkpoint(run: Path) -> int:
    """Return the step of the last complete checkpoint, or 0."""
    complete = (run / "checkpoint").glob("step-*/complete.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in complete), default=0)
