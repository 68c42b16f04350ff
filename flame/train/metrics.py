"""What a logged step says: one JSON object, a line of metrics.jsonl.

The names are those that people plot already. A number that is not known, or not finite, is null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flame.train.interval import Interval, SaveTimes
from flame.train.log import log
from flame.train.losses import LossReport

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The device's memory since the last logged step (peaks) and since the process began (counts)."""

    max_active_gib: float
    max_reserved_gib: float
    num_alloc_retries: int
    num_ooms: int


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """All that is logged of a step. Losses are in nats a label; `validation` maps a set's name to loss, ppl, bpb.

    Losses and tokens, those of the sources too, are the step's, over all ranks; `interval` is the steps up to it;
    `load_seconds` is what loading took, told with the first logged step of a process.
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    segment: int
    stage: int
    losses: LossReport
    source_names: Sequence[str]
    lr: float
    grad_norm: float | None
    skipped_steps: int
    interval: Interval
    world_size: int
    peak_flops: float | None = None
    memory: MemoryUse | None = None
    saves: SaveTimes = field(default_factory=SaveTimes)
    load_seconds: float | None = None
    validation: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object of one line of metrics.jsonl."""
        values: dict[str, Any] = {
            "step": self.step,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "segment": self.segment,
            "stage": self.stage,
            "loss_metrics/global_avg_loss": self.losses.avg_loss,
            "loss_metrics/global_max_loss": self.losses.max_loss,
            "optimizer/lr": self.lr,
            "optimizer/grad_norm": self.grad_norm,
            "optimizer/skipped_step": self.skipped_steps,
            **self._speed(),
            **self._disk(),
            **self._memory(),
            **self._balance(),
            **{f"loss/{name}": loss for name, loss in zip(self.source_names, self.losses.by_source, strict=True)},
            **{f"tokens/{name}": n for name, n in zip(self.source_names, self.losses.tokens_by_source, strict=True)},
            "highest_losses": [row.to_json() for row in self.losses.rows],
            "loss_spikes": [spike.to_json() for spike in self.losses.spikes],
        }
        for name, scores in self.validation.items():
            values |= {f"validation/{name}/{score}": value for score, value in scores.items()}
        return {name: finite_or_none(value) for name, value in values.items()}

    def _balance(self) -> dict[str, float]:
        balance = self.losses.balance_loss
        return {} if balance is None else {"loss_metrics/load_balancing_loss": balance}

    def _speed(self) -> dict[str, float | None]:
        interval = self.interval
        if interval.num_steps == 0 or interval.seconds <= 0:
            return dict.fromkeys(_SPEED_NAMES)
        tokens_per_second = interval.num_tokens / interval.seconds
        flops_per_second = None if interval.flops is None else interval.flops / interval.seconds / self.world_size
        mfu = None
        if flops_per_second is not None and self.peak_flops is not None:
            mfu = 100 * flops_per_second / self.peak_flops
        values = (
            tokens_per_second / self.world_size,
            tokens_per_second,
            None if flops_per_second is None else flops_per_second / 1e12,
            mfu,
            interval.seconds / interval.num_steps,
            interval.wait_seconds / interval.num_steps,
            100 * interval.wait_seconds / interval.seconds,
        )
        return dict(zip(_SPEED_NAMES, values, strict=True))

    def _disk(self) -> dict[str, float | None]:
        num_steps = self.interval.num_steps
        return {
            "time_metrics/load(s)": self.load_seconds,
            "time_metrics/save(s)": self.saves.save_seconds,
            "time_metrics/save_stall(s)": self.saves.stalled_seconds / num_steps if num_steps else None,
        }

    def _memory(self) -> dict[str, float | int | None]:
        memory = self.memory
        return {
            "memory/max_active(GiB)": None if memory is None else memory.max_active_gib,
            "memory/max_reserved(GiB)": None if memory is None else memory.max_reserved_gib,
            "memory/num_alloc_retries": None if memory is None else memory.num_alloc_retries,
            "memory/num_ooms": None if memory is None else memory.num_ooms,
        }


_SPEED_NAMES = (
    "throughput(tps)",
    "throughput/global(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(s)",
    "time_metrics/data_loading(%)",
)


def finite_or_none(value: Any) -> Any:
    """Return `value`, or None where it is a float that JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """Appends lines to metrics.jsonl. A disk that refuses them is told once and never stops training.

    `path` None writes nothing: the ranks that do not log. The file always ends in a whole line.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._refused = False

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object as a line."""
        if self._path is None:
            return
        line = json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
        size_before: int | None = None
        try:
            with open(self._path, "ab") as file:
                size_before = file.tell()
                file.write(line)
        except OSError as error:
            if size_before is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, size_before)
            if not self._refused:
                log.warning("metrics are not written, training goes on: %s: %s", self._path, error)
            self._refused = True


def memory_use(device: torch.device) -> MemoryUse | None:
    """Return the device's memory use since the last call, and begin new peaks; None on a CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return MemoryUse(
        max_active_gib=stats["active_bytes.all.peak"] / _GIB,
        max_reserved_gib=stats["reserved_bytes.all.peak"] / _GIB,
        num_alloc_retries=stats["num_alloc_retries"],
        num_ooms=stats["num_ooms"],
    )
