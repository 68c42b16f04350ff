"""What a logged step says: one JSON object in metrics.jsonl, and one line on the console.

The names are those that people plot already. A number that is not known, or not finite, is null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flame.train.log import live_width, log, show_live
from flame.train.losses import LossReport

_GIB = 1 << 30
_RESET = "\033[0m"
_COLORS = {"step": "\033[36m", "loss": "\033[32m", "time": "\033[2m"}


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The device's memory since the last logged step (peaks) and since the process began (counts)."""

    max_active_gib: float
    max_reserved_gib: float
    num_alloc_retries: int
    num_ooms: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The steps since the last logged one. `num_tokens` and `flops` are those of all ranks; waits are this rank's."""

    num_steps: int
    seconds: float
    wait_seconds: float
    num_tokens: int
    flops: int | None


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What saving took since the last logged step: the last save that became whole, and what training stood still."""

    save_seconds: float | None = None
    stalled_seconds: float = 0.0


class IntervalClock:
    """Times the steps between two logged ones, without what is no training (validation, saving)."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._began = time.perf_counter()
        self._num_steps = 0
        self._num_tokens = 0
        self._wait_seconds = 0.0
        self._flops: int | None = 0

    def count_step(self, *, num_tokens: int, wait_seconds: float, flops: int | None) -> None:
        """Count one step of `num_tokens` tokens and `flops` operations, over all ranks."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._wait_seconds += wait_seconds
        self._flops = None if flops is None or self._flops is None else self._flops + flops

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent in the block out of the interval."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def next_interval(self) -> Interval:
        """Return the interval that ends here, and begin the next one."""
        interval = Interval(
            num_steps=self._num_steps,
            seconds=time.perf_counter() - self._began,
            wait_seconds=self._wait_seconds,
            num_tokens=self._num_tokens,
            flops=self._flops,
        )
        self._restart()
        return interval


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """All that is logged of a step. Losses are in nats a label; `validation` maps a set's name to loss, ppl, bpb.

    Losses and tokens, those of the sources too, are the step's, over all ranks; `interval` is the steps up to it.
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
    saves: SaveTimes = SaveTimes()
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
            **self._saving(),
            **self._memory(),
            **{f"loss/{name}": loss for name, loss in zip(self.source_names, self.losses.by_source, strict=True)},
            **{f"tokens/{name}": n for name, n in zip(self.source_names, self.losses.tokens_by_source, strict=True)},
            "highest_losses": [row.to_json() for row in self.losses.rows],
            "loss_spikes": [spike.to_json() for spike in self.losses.spikes],
        }
        for name, scores in self.validation.items():
            values |= {f"validation/{name}/{score}": value for score, value in scores.items()}
        return {name: finite_or_none(value) for name, value in values.items()}

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

    def _saving(self) -> dict[str, float | None]:
        num_steps = self.interval.num_steps
        return {
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


def console_line(values: Mapping[str, Any], *, total_steps: int, elapsed_seconds: float, color: bool = False) -> str:
    """Return the line that people read, from the object of metrics.jsonl.

    `elapsed_seconds` is training time over all starts of the run; the time left goes by the last interval.
    """
    paint = _paint if color else _plain
    parts = [
        paint("step", f"step {values['step']:>{len(str(total_steps))}}/{total_steps}"),
        paint("loss", f"loss {_number(values['loss_metrics/global_avg_loss'], '.4f')}"),
        f"grad_norm {_number(values['optimizer/grad_norm'], '.3f')}",
        f"lr {values['optimizer/lr']:.3e}",
        f"{_number(values['throughput/global(tps)'], ',.0f')} tok/s",
    ]
    if values["mfu(%)"] is not None:
        parts.append(f"mfu {values['mfu(%)']:.1f}%")
    if values["memory/max_active(GiB)"] is not None:
        parts.append(f"memory {values['memory/max_active(GiB)']:.1f} GiB")
    if values["optimizer/skipped_step"]:
        parts.append(f"skipped {values['optimizer/skipped_step']}")
    parts += [
        f"{name.removesuffix('/loss')} {_number(value, '.4f')}"
        for name, value in values.items()
        if name.startswith("validation/") and name.endswith("/loss")
    ]
    parts.append(paint("time", f"[{clock(elapsed_seconds)} < {_time_left(values, total_steps)}]"))
    return "  ".join(parts)


def _time_left(values: Mapping[str, Any], total_steps: int) -> str:
    step_seconds = values["time_metrics/end_to_end(s)"]
    return "?" if step_seconds is None else clock(step_seconds * (total_steps - values["step"]))


def live_line(
    values: Mapping[str, Any], *, total_steps: int, elapsed_seconds: float, width: int, color: bool = False
) -> str:
    """Return the line of the latest step on a terminal, in `width` characters: what has no room is left away."""
    paint = _paint if color else _plain
    parts = [
        ("step", f"step {values['step']}/{total_steps}"),
        ("loss", f"loss {_number(values['loss_metrics/global_avg_loss'], '.4f')}"),
        ("time", f"[{clock(elapsed_seconds)} < {_time_left(values, total_steps)}]"),
        ("", f"{_number(values['throughput/global(tps)'], ',.0f')} tok/s"),
        ("", f"mfu {_number(values['mfu(%)'], '.1f')}%" if values["mfu(%)"] is not None else ""),
    ]
    room, shown = width + 2, []
    for kind, text in parts:
        if text and len(text) + 2 <= room:
            room -= len(text) + 2
            shown.append(paint(kind, text) if kind else text)
    return "  ".join(shown)


def tell_step(values: Mapping[str, Any], *, total_steps: int, elapsed_seconds: float, color: bool, keep: bool) -> None:
    """Tell people of a logged step: in the live line, where there is one; if not, or to `keep` it, in its own line."""
    width = live_width()
    if width is None or keep:
        log.info(console_line(values, total_steps=total_steps, elapsed_seconds=elapsed_seconds, color=color))
    if width is not None:
        show_live(live_line(values, total_steps=total_steps, elapsed_seconds=elapsed_seconds, width=width, color=color))


def use_color(*, disabled: bool) -> bool:
    """Return whether the console takes colors: a terminal, no NO_COLOR, and not `metrics.disable_color_printing`."""
    return not disabled and "NO_COLOR" not in os.environ and sys.stderr.isatty()


def clock(seconds: float) -> str:
    """Return a length of time as h:mm:ss, with days in front where there are any."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hour}:{minute:02d}:{second:02d}"


def _paint(kind: str, text: str) -> str:
    return f"{_COLORS[kind]}{text}{_RESET}"


def _plain(_kind: str, text: str) -> str:
    return text


def _number(value: float | None, spec: str) -> str:
    return "none" if value is None else format(value, spec)
