"""The soak's training: killed and stopped at random moments, it must be the run that nobody disturbed, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_commands import environment, script
from demo_training import last_checkpoint, last_step
from soak_memory import MemoryWatch
from soak_report import SoakError, Stop, say

POLL_SECONDS = 0.005
WATCH_SECONDS = 0.1
MOST_GROWTH_MIB = 2.0
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
_COMPARED = ("step", "stage", "consumed_", "loss_metrics/", "optimizer/", "tokens/", "validation/")


@dataclass(frozen=True, kw_only=True)
class TrainingSoak:
    """One run twice: `straight`, and `stopped` as often as `kills` and `terms` say."""

    folder: Path
    corpus: Path
    steps: int
    ranks: int
    kills: int
    terms: int

    @property
    def straight(self) -> Path:
        return self.folder / "straight"

    @property
    def stopped(self) -> Path:
        return self.folder / "stopped"

    def command(self, run: Path) -> list[str]:
        options = {
            "job.dump_folder": run,
            "model.config": self.folder / "model.json",
            "training.dataset": self.corpus,
            "training.varlen": "true",
            "training.batch_size": 1,
            "training.gradient_accumulation_steps": 2,
            "training.seq_len": 256,
            "training.context_len": 128,
            "training.window_len": 128,
            "training.steps": self.steps,
            "training.num_workers": 2,
            "training.deterministic": "true",
            "lr_scheduler.warmup_steps": 20,
            "validation.dataset": f"{self.corpus}@val",
            "validation.freq": 25,
            "validation.tokens": 2048,
            "metrics.log_freq": 1,
            "checkpoint.interval": 10,
            "checkpoint.keep_latest_k": 2,
            "comm.trace_buf_size": 500,  # a ring of collectives that is full early: until then it grows
        }
        return [str(script("flame-train")), *(f"--{name}={value}" for name, value in options.items())]

    def environment(self) -> dict[str, str]:
        return environment() | {"NGPU": str(self.ranks), "OMP_NUM_THREADS": "1"}


def train_straight(soak: TrainingSoak) -> tuple[float, list[str]]:
    """Train in peace; returns the seconds that passed before the first step was logged, and whose memory grew."""
    (soak.folder / "model.json").write_text(json.dumps(MODEL))
    began = time.monotonic()
    process = _run(soak, soak.straight)
    while last_step(soak.straight) == 0 and process.poll() is None:
        time.sleep(POLL_SECONDS)
    start_seconds = time.monotonic() - began
    memory = MemoryWatch(process.pid)
    while process.poll() is None:
        memory.look(last_step(soak.straight))
        time.sleep(WATCH_SECONDS)
    if process.returncode != 0:
        raise SoakError(f"the undisturbed run exited {process.returncode}: {_log(soak.straight)}")
    return start_seconds, _grown(soak, memory)


def _grown(soak: TrainingSoak, memory: MemoryWatch) -> list[str]:
    """Say how much each process held early and late, and return those that grew."""
    found = []
    for number, (early, late) in enumerate(memory.early_and_late(soak.steps)):
        told = f"process {number}: {early:.1f} MiB in the second quarter of the steps, {late:.1f} MiB in the last"
        say(f"    memory of {told}")
        if late - early > MOST_GROWTH_MIB:
            found.append(f"memory grew in {told}")
    return found or ([] if memory.early_and_late(soak.steps) else ["no process was seen for long enough to tell"])


def train_with_stops(soak: TrainingSoak, moments: random.Random, start_seconds: float) -> list[Stop]:
    """Train again, stopped at random moments, and then to the end; returns what was done."""
    kinds = [signal.SIGKILL] * soak.kills + [signal.SIGTERM] * soak.terms
    moments.shuffle(kinds)
    stops = []
    for number, kind in enumerate(kinds):
        # Early stops must leave something to do for the later ones.
        reach = max(2, 2 * (soak.steps - last_checkpoint(soak.stopped)) // (len(kinds) - number + 1))
        by_time = moments.random() < 0.4
        goal = None if by_time else last_checkpoint(soak.stopped) + moments.randint(1, reach)
        delay = moments.uniform(0, 1.3 * start_seconds) if by_time else moments.uniform(0, 0.1)
        stops.append(_stopped_once(soak, kind, goal=goal, delay=delay))
        say(f"    training {number + 1:>2}/{len(kinds)}: {stops[-1]}")
    if (code := _run(soak, soak.stopped).wait()) != 0:
        raise SoakError(f"the run that was stopped exits {code} when it is left alone: {_log(soak.stopped)}")
    return stops


def _stopped_once(soak: TrainingSoak, kind: signal.Signals, *, goal: int | None, delay: float) -> Stop:
    already = _size(soak.stopped / "segments.jsonl")
    process = _run(soak, soak.stopped)
    # Lines of steps that this start has not taken back yet say nothing of it.
    while goal is not None and process.poll() is None:
        if _size(soak.stopped / "segments.jsonl") > already and last_step(soak.stopped) >= goal:
            break
        time.sleep(POLL_SECONDS)
    time.sleep(delay)
    reached = last_step(soak.stopped)
    if process.poll() is None:  # while it is not waited for, its number is nobody else's
        os.kill(process.pid, kind)
    code = process.wait()
    # Before Python listens, SIGTERM ends the process as any other: nothing was trained, and nothing is lost.
    expected = (0, -signal.SIGKILL) if kind == signal.SIGKILL else (0, 75, -signal.SIGTERM)
    if code not in expected:
        raise SoakError(f"a run exited {code} after {kind.name}: {_log(soak.stopped)}")
    moment = f"{delay:.2f} s after " + ("its start" if goal is None else f"step {goal}")
    return Stop(signal=kind.name.removeprefix("SIG"), moment=moment, at=reached, exit_code=code)


def _run(soak: TrainingSoak, run: Path) -> subprocess.Popen[bytes]:
    with open(_log(run), "ab") as log:
        return subprocess.Popen(
            soak.command(run), env=soak.environment(), stdout=log, stderr=log, start_new_session=True
        )


def _log(run: Path) -> Path:
    return run.with_suffix(".log")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def differences(soak: TrainingSoak) -> list[str]:
    """Name what differs between the two runs: each step's losses and norms, and each tensor of the last checkpoint."""
    found = []
    one, other = (_lines(run) for run in (soak.straight, soak.stopped))
    if [line["step"] for line in other] != list(range(1, soak.steps + 1)):
        found.append("metrics.jsonl does not hold each step once, in order")
    for line, twin in zip(one, other, strict=False):
        names = sorted(name for name in line.keys() | twin.keys() if line.get(name) != twin.get(name))
        found += [f"step {line['step']}: {name} {line.get(name)} and {twin.get(name)}" for name in names]
    state, twin_state = (_tensors(run / "checkpoint" / f"step-{soak.steps}") for run in (soak.straight, soak.stopped))
    found += [
        f"tensor {name}"
        for name in sorted(state.keys() | twin_state.keys())
        if name not in state or name not in twin_state or state[name] != twin_state[name]
    ]
    return found


def _lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name.startswith(_COMPARED)} for line in lines]


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Return the bytes, shape and dtype of every tensor of a checkpoint; its train state without the seconds."""
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in stored.items()}
    with warnings.catch_warnings(action="ignore"):  # that there are no ranks is meant
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    result: dict[str, Any] = {
        name: (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()
    }
    train_state = json.loads(tensors["train_state"].numpy().tobytes())
    del train_state["elapsed_seconds"]
    return result | {"train_state": train_state}
