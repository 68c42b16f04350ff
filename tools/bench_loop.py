"""What the training loop itself costs a step: everything but the model, in CPU milliseconds of the whole process.

    python tools/bench_loop.py            # a table: 65,536 packed tokens a step
    python tools/bench_loop.py --json     # one object a row

`flame-train` runs as ever, in this process, on one rank of the CPU, but forward and backward are left out: the losses
are zeros, and only the smallest weight has a gradient. What is left is the loader (its threads too), sums over ranks,
rates and random numbers, clipping and the optimizer's calls, signals, metrics, loggers, and checkpoints' bookkeeping.
Exit code 1 if a row is above 2 ms a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_runs import VOCABULARY, make_corpus

from flame.train import loop
from flame.train import step as training_step
from flame.train.checkpoint_saver import CheckpointSaver
from flame.train.config import parse_train_config
from flame.train.loader import StepBatch, StepLoader
from flame.train.losses import LossSums
from flame.train.step_log import StepLog
from flame.train.update import UpdateAfterBackward

MOST_MS = 2.0
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": True,
}
ROWS: dict[str, dict[str, object]] = {
    "logged every 10th (default)": {},
    "logged each step": {"metrics.log_freq": 1},
    "TensorBoard too, every 10th": {"metrics.enable_tensorboard": "true"},
    "4 micro-batches of 8 x 2048": {
        "training.seq_len": 2048,
        "training.context_len": 2048,
        "training.batch_size": 8,
        "training.gradient_accumulation_steps": 4,
    },
}
# Where the time of a step goes: functions of the loop's, none within another.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "read": ((StepLoader, "_read"),),
    "agree": ((loop, "agree"),),
    "rates": ((training_step, "apply_hyperparameters"), (training_step, "seed_random")),
    "update": ((UpdateAfterBackward, "finish"),),
    "log": ((StepLog, "count"), (StepLog, "write")),
    "save": ((CheckpointSaver, "poll"), (CheckpointSaver, "take_times")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="measured steps a row (600)")
    parser.add_argument("--warm", type=int, default=100, help="steps before them (100)")
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        corpus = make_corpus(Path(scratch, "corpus"), num_tokens=50_000_000)
        model = Path(scratch, "model.json")
        model.write_text(json.dumps(MODEL))
        rows = [
            measure(name, chosen, corpus, model, Path(scratch, f"run-{number}"), options)
            for number, (name, chosen) in enumerate(ROWS.items())
        ]
    if options.json:
        for row in rows:
            print(json.dumps(row))
    else:
        names = ["cpu", *PARTS, "rest", "wall"]
        print(f"{'ms a step':<34}" + "".join(f"{name:>9}" for name in names))
        for row in rows:
            print(f"{row['name']:<34}" + "".join(f"{row[name]:>9.3f}" for name in names))
    return int(any(row["cpu"] > MOST_MS for row in rows))


def measure(
    name: str, chosen: dict[str, object], corpus: Path, model: Path, run: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run `flame-train` once, without its model, and return its row."""
    argv = {
        "job.dump_folder": run,
        "model.config": model,
        "training.dataset": corpus,
        "training.varlen": "true",
        "training.batch_size": 1,
        "training.seq_len": 65_536,
        "training.context_len": 4096,
        "training.steps": options.warm + options.steps + 1,
        "checkpoint.export_hf": "false",
        "checkpoint.interval": 10**6,
        **chosen,
    }
    config = parse_train_config([f"--{key}={value}" for key, value in argv.items()])
    stand_in = StandIn(first=options.warm + 1, last=options.warm + options.steps + 1)
    with mock.patch.object(training_step, "backward", stand_in.backward):
        patches = [
            mock.patch.object(owner, function, stand_in.timed(part, getattr(owner, function)))
            for part, functions in PARTS.items()
            for owner, function in functions
        ]
        for patch in patches:
            patch.start()
        try:
            code = loop.train(config)
        finally:
            for patch in patches:
                patch.stop()
    assert code == 0, code
    cpu, wall = (1000 * seconds / options.steps for seconds in stand_in.spent())
    parts = {part: 1000 * stand_in.seconds[part] / options.steps for part in PARTS}
    return {"name": name, "cpu": cpu, **parts, "rest": cpu - sum(parts.values()), "wall": wall}


class StandIn:
    """Takes the place of forward and backward, and reads the clocks there, from step `first` to step `last`."""

    def __init__(self, *, first: int, last: int) -> None:
        self._first, self._last, self._calls = first, last, 0
        self._clocks: list[tuple[float, float]] = []
        self._weight: torch.nn.Parameter | None = None
        self.seconds: Counter[str] = Counter()
        """CPU seconds of each part's own thread."""

    def backward(self, module: Any, batch: StepBatch, _offload: Any, window_len: int) -> LossSums:
        self._calls += 1
        if self._calls in (self._first, self._last):
            self._clocks.append((time.process_time(), time.perf_counter()))
        if self._weight is None:
            self._weight = min(module.parameters(), key=torch.Tensor.numel)
            self._gradient = torch.zeros_like(self._weight)
        self._weight.grad = self._gradient
        num_samples = sum(micro.input_ids.numel() // window_len for micro in batch.micro_batches)
        return LossSums(loss=torch.zeros(()), balance=None, samples=torch.zeros(num_samples))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                if self._first <= self._calls < self._last:
                    self.seconds[part] += time.thread_time() - began

        return measured

    def spent(self) -> tuple[float, float]:
        """Return the CPU seconds of the process and the seconds between the two steps."""
        (cpu, wall), (later_cpu, later_wall) = self._clocks
        return later_cpu - cpu, later_wall - wall


if __name__ == "__main__":
    sys.exit(main())
