"""`flame-train plot`: the loss of one run or several as a picture, by matplotlib (the extra `plot`)."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.config import option
from flame.errors import UsageError
from flame.sampling.history import METRICS, read_logged
from flame.sampling.stages import short_count

LOSS = "loss_metrics/global_avg_loss"
_PICTURES = (".png", ".svg", ".pdf")
_POINTS = 200  # as many as can be told apart: by default, means are taken over what is more
_NAMES_A_COLUMN = 20


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """The options of `flame-train plot`."""

    run: tuple[Path, ...] = option((), help="run folders", positional=True, repeat=True)
    output: Path = option(Path("loss.png"), help="the picture: .png, .svg or .pdf", metavar="FILE.png")
    x: str = option(
        "tokens", help="what it is drawn over; time is that of training", choices=("tokens", "steps", "time")
    )
    metric: str = option(LOSS, help="a name of metrics.jsonl; with the loss, that of validation is drawn too")
    smooth: int | None = option(
        None, help="draw means of this many logged steps; by default so many that 200 points are left; 1: none"
    )

    def __post_init__(self) -> None:
        if not self.run:
            raise UsageError("plot needs a run", expected="one run folder or several")
        if self.smooth is not None and self.smooth < 1:
            raise UsageError("--smooth is no number of steps", got=self.smooth, expected="1 or more")
        if self.output.suffix not in _PICTURES:
            raise UsageError("--output is no picture", got=self.output, expected="a name with .png, .svg or .pdf")
        if not self.output.absolute().parent.is_dir():
            raise UsageError("the folder of --output does not exist", got=self.output)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What is drawn of a run: points in order of x; `name` is the run's, with the validation set's if there are any."""

    run: int
    name: str
    is_validation: bool
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def plot(options: PlotOptions) -> int:
    """Draw the picture, and say where it is. Raises `UsageError` for a run or a metric that is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plot needs matplotlib, which is not installed", fix='pip install "flame[plot]"')
    curves, num_averaged = curves_of(options)
    draw(options, curves, num_averaged)
    print(options.output)
    return 0


def curves_of(options: PlotOptions) -> tuple[list[Curve], int]:
    """Return the curves of all runs, and over how many logged steps means are taken in those of training."""
    runs = [steps_of(run) for run in options.run]
    given = Counter(run.resolve().name for run in options.run)
    names = [run.resolve().name if given[run.resolve().name] == 1 else str(run) for run in options.run]
    found = [_curve(i, names[i], lines, options.metric, options.x, False) for i, lines in enumerate(runs)]
    for run, curve in zip(options.run, found, strict=True):
        if not len(curve.x):
            raise _no_such_metric(run, options.metric, runs[curve.run])
    num_averaged = options.smooth or max(1, max(len(curve.x) for curve in found) // _POINTS)
    curves = [_averaged(curve, num_averaged) for curve in found]
    for i, lines in enumerate(runs if options.metric == LOSS else ()):
        sets = sorted({name for line in lines for name in line if _is_validation_loss(name)})
        for name in sets:
            told = names[i] + name.removeprefix("validation").removesuffix("/loss")
            curves.append(_curve(i, told, lines, name, options.x, True))
    return [curve for curve in curves if len(curve.x)], num_averaged


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return a run's logged steps, each once: what a later start trained anew counts, as in the run itself."""
    path = run / METRICS
    if not path.is_file():
        raise UsageError("the folder holds no logged steps", got=run, expected=f"a run folder, with its {METRICS}")
    steps: list[dict[str, Any]] = []
    for line in read_logged(path):
        while steps and steps[-1]["step"] >= line["step"]:
            steps.pop()
        steps.append(line)
    return steps


def _curve(run: int, name: str, lines: Sequence[dict[str, Any]], metric: str, x: str, is_validation: bool) -> Curve:
    places = _X[x][1](lines)
    known = [(place, line[metric]) for place, line in zip(places, lines, strict=True) if _is_number(line.get(metric))]
    points = np.array(known, dtype=np.float64).reshape(-1, 2)
    return Curve(run=run, name=name, is_validation=is_validation, x=points[:, 0], y=points[:, 1])


def _averaged(curve: Curve, count: int) -> Curve:
    """Return the means of the last `count` points at each point, of as many as there are at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - count, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return Curve(run=curve.run, name=curve.name, is_validation=curve.is_validation, x=curve.x, y=means)


def _is_validation_loss(name: str) -> bool:
    return name.startswith("validation/") and name.endswith("/loss")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_such_metric(run: Path, metric: str, lines: Sequence[dict[str, Any]]) -> UsageError:
    names = sorted({name for line in lines for name, value in line.items() if _is_number(value)} - {"step"})
    near = difflib.get_close_matches(metric, names, 1, 0.4)
    return UsageError(
        "the run has logged no number of this name",
        where=run,
        got=metric,
        expected="one of " + ", ".join(names) if names else "logged steps",
        fix=f"Did you mean {near[0]!r}?" if near else None,
    )


def _tokens(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["consumed_tokens"] for line in lines]


def _steps(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["step"] for line in lines]


def _hours(lines: Sequence[dict[str, Any]]) -> list[float]:
    """Return the hours that were trained: without validation, saving, stops, and what was taken back."""
    before, hours, found = 0, 0.0, []
    for line in lines:
        hours += (line["step"] - before) * (line.get("time_metrics/end_to_end(s)") or 0.0) / 3600
        before = line["step"]
        found.append(hours)
    return found


_X: dict[str, tuple[str, Callable[[Sequence[dict[str, Any]]], list[float]]]] = {
    "tokens": ("tokens", _tokens),
    "steps": ("steps", _steps),
    "time": ("hours of training", _hours),
}


def draw(options: PlotOptions, curves: Sequence[Curve], num_averaged: int) -> None:
    """Draw curves, a colour a run, dashed those of validation; names stand beside it, as high as the curves end."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_runs = len(options.run)
    few, columns = num_runs <= 10, -(-num_runs // _NAMES_A_COLUMN)
    figure = Figure(figsize=(8 + 1.5 * columns, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    palette = colormaps["tab10"](np.arange(10)) if few else colormaps["turbo"](np.linspace(0.05, 0.95, num_runs))
    named = []
    for curve in sorted(curves, key=lambda curve: -curve.y[-1]):
        drawn = axis.plot(
            curve.x,
            curve.y,
            color=tuple(palette[curve.run]),
            linestyle="--" if curve.is_validation else "-",
            linewidth=1.4 if few else 0.9,
            marker="o" if len(curve.x) == 1 else None,
            markersize=3,
            label=curve.name,
        )
        if num_runs == 1 or not curve.is_validation:
            named += drawn
    label = "loss (nats a label)" if options.metric == LOSS else options.metric
    told = [label] + [f"mean of {num_averaged} logged steps"] * (num_averaged > 1)
    if any(curve.is_validation for curve in curves):
        told.append("dashed: validation")
    axis.set(xlabel=_X[options.x][0], ylabel=", ".join(told))
    if options.x == "tokens":
        axis.xaxis.set_major_formatter(lambda tokens, _: short_count(round(tokens)))
    axis.grid(alpha=0.25)
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False}
    axis.legend(handles=named, ncols=columns, fontsize="small", **beside)
    figure.savefig(options.output, dpi=150)
