"""Ranks that do something at a chosen moment: they are signalled or killed there, and note which samples they trained.

A rank that is a process of its own installs this by a sitecustomize.py on its path (`in_ranks`); a run in the test's
own process, by monkeypatch (`note_samples`, `signal_before_step`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_SITE = """
import os
if "RANK" in os.environ:
    from tests import faults
    faults.install(os.environ["FLAME_FAULTS"])
"""


def in_ranks(
    folder: Path,
    *,
    hold_start: bool = False,
    stop_before: int | None = None,
    hold_saves: bool = False,
    not_finite: Sequence[int] = (),
    hang_in: int | None = None,
) -> dict[str, str]:
    """The environment of ranks that write what they do into `folder`.

    `hold_start`: each rank waits, before it imports anything, until somebody writes into `rank-N.fifo`.
    `stop_before`: the last rank sends itself SIGTERM when it takes the batch of that step. `hold_saves`: before its
    part of a checkpoint, each rank makes `rank-N.saving` and waits until somebody writes into `rank-N.fifo`.
    `not_finite`: the steps in which the last rank's loss is NaN (odd steps) or infinite. `hang_in`: the last rank never
    comes back from the backward of that step of its start.
    """
    from tests.runs import PROJECT

    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_SITE)
    plan = {
        "folder": str(folder),
        "hold_start": hold_start,
        "stop_before": stop_before,
        "hold_saves": hold_saves,
        "not_finite": [*not_finite],
        "hang_in": hang_in,
    }
    return {"PYTHONPATH": f"{site}:{PROJECT}", "FLAME_FAULTS": json.dumps(plan)}


def install(plan_json: str) -> None:
    """Run inside a rank, before anything else."""
    plan = json.loads(plan_json)
    folder, rank = Path(plan["folder"]), int(os.environ["RANK"])
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    if plan["hold_start"]:
        _wait_at(folder / f"rank-{rank}.fifo")
        return
    from flame.train import checkpoint

    patch = pytest.MonkeyPatch()
    note_samples(patch, folder / f"rank-{rank}.samples")
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        poison_loss(patch, plan["not_finite"])
        if plan["stop_before"] is not None:
            signal_before_step(patch, plan["stop_before"])
        if plan["hang_in"] is not None:
            hang_in_backward(patch, plan["hang_in"])
    if plan["hold_saves"]:
        write = checkpoint._write_tensors

        def held(temporary: Path, *others: Any) -> Any:
            step = temporary.name.removeprefix("step-").removesuffix(".tmp")
            (folder / f"rank-{rank}.saving.tmp").write_text(step)
            (folder / f"rank-{rank}.saving.tmp").rename(folder / f"rank-{rank}.saving")
            _wait_at(folder / f"rank-{rank}.fifo")
            return write(temporary, *others)

        patch.setattr(checkpoint, "_write_tensors", held)


def _wait_at(fifo: Path) -> None:
    """Wait until somebody has written: read to the end, or a writer that comes late to its write finds no reader."""
    fifo.read_text()


def note_samples(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Append a line for every step that this rank trains: samples consumed by then, its own, and ids by micro-step."""
    from flame.train import step

    backward = step.backward

    def noted(module: Any, batch: Any, *others: Any) -> Any:
        ids = [micro.input_ids.flatten().tolist() for micro in batch.micro_batches]
        with open(path, "a") as file:
            file.write(json.dumps([batch.consumed_samples, batch.samples.tolist(), ids]) + "\n")
        return backward(module, batch, *others)

    patch.setattr(step, "backward", noted)


def hang_in_backward(patch: pytest.MonkeyPatch, step: int) -> None:
    """Make this rank stay for ever in the backward of this step of its start."""
    from flame.train import step as training_step

    backward, calls = training_step.backward, 0

    def sleep_for_ever(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        while calls == step:
            time.sleep(3600)
        return backward(*arguments)

    patch.setattr(training_step, "backward", sleep_for_ever)


def poison_loss(patch: pytest.MonkeyPatch, steps: Sequence[int]) -> None:
    """Make this rank's own loss NaN or infinite in these steps of its start, and with it its gradients."""
    from flame.train.model import CausalLMLoss

    forward, calls = CausalLMLoss.forward, 0

    def poisoned(module: CausalLMLoss, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        parts = forward(module, *arguments)
        factor = float("nan") if calls % 2 else float("inf")
        return parts._replace(loss_sum=parts.loss_sum * factor) if calls in steps else parts

    patch.setattr(CausalLMLoss, "forward", poisoned)


def signal_before_step(
    patch: pytest.MonkeyPatch, step: int, number: signal.Signals = signal.SIGTERM, *, first_step: int = 1
) -> None:
    """Send this process a signal while it waits for the batch of `step`; it started with `first_step`."""
    from flame.train.loader import StepLoader

    take, calls = StepLoader.__next__, 0

    def signalled(loader: StepLoader) -> Any:
        nonlocal calls
        batch = take(loader)
        if first_step + calls == step:
            os.kill(os.getpid(), number)
        calls += 1
        return batch

    patch.setattr(StepLoader, "__next__", signalled)


def signal_within(patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Make a function begin with two signals to its own process."""
    original = getattr(module, name)

    def disturbed(*arguments: Any, **named: Any) -> Any:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    patch.setattr(module, name, disturbed)


def is_held(pid: int, number: signal.Signals) -> bool:
    """Whether a signal to a process waits to be taken, as the kernel tells it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = (int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))
    return any(mask >> (number - 1) & 1 for mask in pending)


def samples_trained(*paths: Path) -> list[list[int]]:
    """The samples of every trained step, of all ranks' files, sorted within the step; in order of the steps."""
    steps: dict[int, list[int]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            consumed, samples, _ = json.loads(line)
            steps.setdefault(consumed, []).extend(samples)
    return [sorted(steps[consumed]) for consumed in sorted(steps)]


def ids_trained(path: Path) -> list[list[list[int]]]:
    """The token ids of each micro-step of each step in a rank's file, in order."""
    return [json.loads(line)[2] for line in path.read_text().splitlines()]
