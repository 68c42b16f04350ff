"""The statistics of a corpus as a picture, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADROOM = 1.3  # of an axis over its highest bar: there the legend lies


def plot(path: Path, value: Mapping[str, Any], *, title: str) -> None:
    """Draw what `stats_report.as_object` returned into a .png, .svg or .pdf."""
    draw(value, title=title).savefig(path, dpi=120)


def draw(value: Mapping[str, Any], *, title: str) -> Figure:
    """Return the picture: documents by tokens, by bytes of text where these are known, and what common ids cover."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = [
        (unit, value[name])
        for name, unit in (("document_tokens", "tokens"), ("document_bytes", "bytes of text"))
        if value[name] is not None
    ]
    figure = Figure(figsize=(5 * (len(lengths) + 1), 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    *by_length, last = figure.subplots(1, len(lengths) + 1)
    for axes, (unit, found) in zip(by_length, lengths, strict=True):
        _draw_lengths(axes, found, unit)
    _draw_coverage(last, value["tokens"]["coverage"], value["num_tokens"])
    return figure


def _draw_lengths(axes: Axes, found: Mapping[str, Any], unit: str) -> None:
    """Draw a bar a power of two, twice: the share of documents of that length, and of all tokens or bytes in them."""
    bins = found["histogram"]
    edges = [max(0.5, one["low"]) for one in bins]
    widths = [one["high"] + 1 - edge for one, edge in zip(bins, edges, strict=True)]
    shares = {what: _percent([one[what] for one in bins]) for what in ("count", "sum")}
    median = f"{found['percentiles']['50']:,}"
    for what, label, colour in (
        ("count", f"of documents, median {median}", "tab:blue"),
        ("sum", f"of {unit}", "tab:orange"),
    ):
        axes.bar(edges, shares[what], widths, align="edge", alpha=0.5, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"length of a document, {unit}")
    axes.set_ylabel("percent")
    axes.set_ylim(0, HEADROOM * max(map(max, shares.values())))
    axes.legend(loc="upper left")


def _draw_coverage(axes: Axes, coverage: Mapping[str, int], num_tokens: int) -> None:
    """Draw how much of all tokens the most common 1, 2, 4, … ids are."""
    axes.plot([int(name) for name in coverage], [100 * count / num_tokens for count in coverage.values()], ".-")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("most common token ids")
    axes.set_ylabel("percent of all tokens")
    axes.set_ylim(0, 105)


def _percent(numbers: list[int]) -> list[float]:
    total = sum(numbers) or 1
    return [100 * number / total for number in numbers]
