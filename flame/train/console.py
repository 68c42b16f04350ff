"""The line that people read of a logged step: one a step, or on a terminal a live one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from flame.train.log import live_width, log, show_live

_RESET = "\033[0m"
_COLORS = {"step": "\033[36m", "loss": "\033[32m", "time": "\033[2m"}


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
    if keep:
        show_live("")  # that of an earlier step, which would stand below this one
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
