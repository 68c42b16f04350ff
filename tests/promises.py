"""What is promised of a run on several ranks, wherever they compute: on CPUs through gloo, on GPUs through NCCL.

The tests of tests/integration and of tests/gpu/test_several_gpus.py hold these promises, each in its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flame.cli.export import main as export
from flame.train.__main__ import main
from flame.train.checkpoint_files import find_damage
from flame.train.run import read_status
from tests.faults import in_ranks, note_samples, samples_trained, signal_before_step
from tests.processes import until
from tests.ranks import train_in_ranks
from tests.runs import (
    FLAME_TRAIN,
    arguments,
    losses_and_norms,
    read_metrics,
    read_segments,
    run_training,
    signal_at,
    start_training,
    tensors_of,
)
from tests.tiny_states import differences

SIGNALLED_STEPS = 60
"""Steps of a run that is signalled in its beginning."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks compute: `loss` and `norm` say how far numbers of other layouts may be off there, of their size.

    `in_process`: a run of one rank needs no process of its own, and several are forked from one that imports once.
    """

    in_process: bool
    loss: float
    norm: float


CPUS = Place(in_process=True, loss=1e-6, norm=1e-5)
GPUS = Place(in_process=False, loss=1e-2, norm=5e-2)  # bf16


def train(
    argv: Sequence[str], place: Place, *, ranks: int, code: int = 0, variables: Mapping[str, str] | None = None
) -> None:
    """Train until the run ends with `code`; `variables`, not for one rank in process, may be those of faults.py."""
    if not place.in_process:
        result = run_training(argv, ranks=ranks, check=code == 0, variables=variables)
        assert result.returncode == code, result.stderr
    elif ranks == 1:
        assert main(argv) == code
    else:
        train_in_ranks(argv, ranks=ranks, code=code, variables=variables)


def a_killed_run_goes_on_to_the_last_bit(
    folder: Path, tmp_path: Path, place: Place, *, ranks: int, chains: Sequence[Sequence[int]], **options: Any
) -> None:
    """Of each chain, all but the last number are steps at whose save the run is killed, launcher and ranks."""
    straight = tmp_path / "straight"
    train(arguments(folder, straight, **options), place, ranks=ranks)
    expected = losses_and_norms(straight)
    assert [step for step, _, _ in expected] == list(range(1, 21))
    assert expected[-1][1] < expected[0][1]
    for *stops, last in chains:
        run = tmp_path / "-".join(map(str, stops))
        for stop in stops:
            # training.steps shapes the schedule, so a run is stopped by killing it.
            argv = arguments(folder, run, **options, checkpoint__interval=stop)
            with start_training(argv, ranks=ranks) as process:
                log = signal_at(process, f"saved {run / 'checkpoint' / f'step-{stop}'}", signal.SIGKILL)
                assert process.wait() == -signal.SIGKILL, log
        train(arguments(folder, run, **options, checkpoint__interval=last), place, ranks=ranks)
        assert losses_and_norms(run) == expected


def two_ranks_then_one_then_more_train_the_same_samples(
    folder: Path, tmp_path: Path, place: Place, *, ranks: int = 4
) -> Path:
    """The global batch stays; ranks, rows, accumulation, the length of a row and the layout change at each start.

    The last `ranks`, 4 or 2, are two replicas, and the run that they finish is exported. Returns its folder.
    """
    straight, run, steps = tmp_path / "straight", tmp_path / "run", 9
    validation = {"validation__dataset": f"{folder / 'web'}@val", "validation__freq": steps}
    common = {"training__steps": steps, **validation}
    train(arguments(folder, straight, **common, training__batch_size=4), place, ranks=1)

    two = arguments(folder, run, **common, training__batch_size=1, training__gradient_accumulation_steps=2)
    train(two, place, ranks=2, code=75, variables=in_ranks(tmp_path / "two", stop_before=4))
    one = arguments(folder, run, **common, training__batch_size=2, training__seq_len=256)
    assert _stopped_on_one_rank(one, tmp_path / "one", place, before=7, first_step=4) == 75
    replicas = {"training__data_parallel_replicate_degree": 2, "checkpoint__export_hf": "true"}
    last = arguments(folder, run, **common, **replicas, training__batch_size=4 // ranks)
    train(last, place, ranks=ranks, variables=in_ranks(tmp_path / "last"))

    notes = sorted(tmp_path.glob("*/*.samples"))
    assert len(notes) == 2 + 1 + ranks and sum(len(note.read_text().splitlines()) for note in notes) == 3 * len(notes)
    assert samples_trained(*notes) == [list(range(4 * step, 4 * step + 4)) for step in range(steps)]
    segments = read_segments(run)
    assert [(s["step"], s["world_size"], s["seq_len"]) for s in segments] == [(0, 2, 128), (3, 1, 256), (6, ranks, 128)]
    for line, other in zip(read_metrics(straight), read_metrics(run), strict=True):
        for name in ("step", "consumed_samples", "consumed_tokens", "optimizer/lr", "tokens/web", "tokens/code"):
            assert line[name] == other[name], name
        close = {"loss_metrics/global_avg_loss": place.loss, "optimizer/grad_norm": place.norm}
        for name, most in close.items():
            most = most if line["step"] > 1 else place.loss
            assert other[name] == pytest.approx(line[name], rel=most), line["step"]
    (score, other_score) = (read_metrics(r)[-1]["validation/web/loss"] for r in (straight, run))
    assert other_score == pytest.approx(score, rel=10 * place.loss)
    return run


def _stopped_on_one_rank(argv: Sequence[str], notes: Path, place: Place, *, before: int, first_step: int) -> int:
    """Train from `first_step` until a signal comes before a step, noting samples; return the exit code."""
    if place.in_process:
        notes.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            note_samples(patch, notes / "rank-0.samples")
            signal_before_step(patch, before, first_step=first_step)
            return main(argv)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    variables = in_ranks(notes, stop_before=before - first_step + 1)
    return run_training(argv, check=False, variables=rank | variables).returncode


def an_export_is_its_checkpoint(run: Path, folder: Path) -> None:
    """What a finished run exported, and what `flame-export` makes in `folder`, has its last checkpoint's weights."""
    checkpoint = run / read_status(run)["checkpoint"]
    trained = {name.removeprefix("model."): tensor for name, tensor in tensors_of(checkpoint, "model.").items()}
    assert export(["hf", "--checkpoint", str(checkpoint), "--output", str(folder), "--check"]) == 0
    for exported in (run / "hf", folder):
        found = load_file(exported / "model.safetensors")
        assert found.keys() == trained.keys()
        assert not differences({name: trained[name].to(tensor.dtype) for name, tensor in found.items()}, found)


def wait_for_step(process: subprocess.Popen[str], step: int) -> list[str]:
    """Read the log of a run of `SIGNALLED_STEPS` until a step is told."""
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if f"step {step:>{len(str(SIGNALLED_STEPS))}}/{SIGNALLED_STEPS}" in line:
            return lines
    raise AssertionError("".join(lines))


def ranks_save_one_step_whatever_signals_come(
    folder: Path,
    tmp_path: Path,
    losses: Sequence[float],
    place: Place,
    *,
    ranks: int = 2,
    launcher: Sequence[str] = FLAME_TRAIN,
    first: signal.Signals = signal.SIGUSR1,
) -> None:
    """`losses` are those of the first steps of a run of the same batch on one rank."""
    run, notes = tmp_path / "run", tmp_path / "notes"
    faults = in_ranks(notes, hold_saves=True)
    argv = arguments(folder, run, training__batch_size=1, training__steps=SIGNALLED_STEPS)
    fifos = [notes / f"rank-{rank}.fifo" for rank in range(ranks)]
    saving = [notes / f"rank-{rank}.saving" for rank in range(ranks)]
    for fifo in fifos:
        os.mkfifo(fifo)
    process = start_training(argv, ranks=ranks, command=launcher, variables=faults)
    log = wait_for_step(process, 4)
    # torchrun kills its ranks after a signal to itself: there the ranks are signalled, here the launcher is.
    pids = [int((notes / f"rank-{rank}.pid").read_text()) for rank in range(ranks)]
    targets = [process.pid] if launcher == FLAME_TRAIN else pids
    os.kill(targets[-1], first)  # one rank is enough: all agree
    assert until(lambda: all(path.exists() for path in saving), process)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for target in targets:
            os.kill(target, number)
    for fifo in fifos:
        fifo.write_text("go on")
    _, rest = process.communicate(timeout=120)
    text = "".join(log) + rest
    if launcher == FLAME_TRAIN:
        assert process.returncode == 75, text
        assert read_status(run)["reason"] == first.name, "the launcher told rank 0 of it"
    else:
        assert process.returncode == 1, "torchrun has no other code for it"
        assert re.search(r"exitcode\s*: 75", text), text
    steps = {path.read_text() for path in saving}
    told = read_status(run)
    assert told["state"] == "preempted" and steps == {str(told["step"])}, told
    (saved,) = (run / "checkpoint").iterdir()
    assert saved.name == f"step-{told['step']}" and find_damage(saved, check_bytes=True) is None
    trained = samples_trained(*(notes / f"rank-{rank}.samples" for rank in range(ranks)))
    assert [sample for step in trained for sample in step] == list(range(ranks * told["step"]))
    found = [loss for _, loss, _ in losses_and_norms(run)]
    assert found == pytest.approx(losses[: len(trained)], rel=10 * place.loss)


def a_killed_rank_stops_the_others(folder: Path, tmp_path: Path, *, ranks: int = 2) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, training__batch_size=1, training__steps=SIGNALLED_STEPS)
    process = start_training(argv, ranks=ranks)
    log = wait_for_step(process, 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == ranks
    os.kill(int(children[1]), signal.SIGKILL)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 1, "".join(log) + rest
    assert "local rank 1 was killed by SIGKILL" in rest
    assert until(lambda: not any(Path(f"/proc/{child}").exists() for child in children)), "a rank outlived its launcher"


def ranks_resume_from_what_was_saved_beside(
    folder: Path, tmp_path: Path, place: Place, *, ranks: int = 2, mode: str = "async", **options: Any
) -> None:
    """A run of 5 steps, large updates and saves beside training; again from step 2, as if all later ones were lost."""
    chosen: dict[str, Any] = {
        "training__steps": 5,
        "training__batch_size": 1,
        "optimizer__lr": 0.01,
        "lr_scheduler__warmup_steps": 0,
        "checkpoint__interval": 2,
        "checkpoint__keep_latest_k": 0,
        "checkpoint__async_mode": mode,
        **options,
    }
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(arguments(folder, straight, **chosen), place, ranks=ranks)
    shutil.copytree(straight, run)
    train(arguments(folder, run, **chosen, checkpoint__load_step=2), place, ranks=ranks)
    abandoned = (run / "metrics.abandoned.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in abandoned] == [3, 4, 5], "these were taken anew"
    assert len(list(run.glob("checkpoint/abandoned-*/step-4"))) == 1
    assert losses_and_norms(run) == losses_and_norms(straight)
    same_checkpoints(run, straight, range(4, 6))


def same_checkpoints(run: Path, straight: Path, steps: Sequence[int]) -> None:
    """Two runs saved the same tensors at these steps, to the last bit."""
    for step in steps:
        one, other = (tensors_of(path / "checkpoint" / f"step-{step}") for path in (run, straight))
        assert differences(one, other) == [], f"step {step}"
