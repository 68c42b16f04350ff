"""The statistics of a corpus as a picture, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot(path: Path, value: Mapping[str, Any], *, title: str) -> None:
    """Draw what `stats_report.as_object` returned: lengths in tokens and bytes, and how much common ids cover."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = [
        (name, unit, value[name]["histogram"])
        for name, unit in (("document_tokens", "tokens"), ("document_bytes", "bytes of text"))
        if value[name] is not None
    ]
    figure = Figure(figsize=(5 * (len(lengths) + 1), 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(1, len(lengths) + 1)
    for axis, (name, unit, bins) in zip(axes, lengths, strict=False):
        edges = [max(0.5, found["low"]) for found in bins]
        widths = [found["high"] + 1 - edge for found, edge in zip(bins, edges, strict=True)]
        for what, colour in (("count", "tab:blue"), ("sum", "tab:orange")):
            total = sum(found[what] for found in bins) or 1
            axis.bar(
                edges,
                [100 * found[what] / total for found in bins],
                widths,
                align="edge",
                alpha=0.5,
                color=colour,
                label=f"of documents, median {value[name]['percentiles']['50']:,}" if what == "count" else f"of {unit}",
            )
        axis.set_xscale("log", base=2)
        axis.set_xlabel(f"length of a document, {unit}")
        axis.set_ylabel("percent")
        axis.legend()
    coverage = value["tokens"]["coverage"]
    axes[-1].plot([int(name) for name in coverage], [100 * n / value["num_tokens"] for n in coverage.values()], ".-")
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_xlabel("most common token ids")
    axes[-1].set_ylabel("percent of all tokens")
    figure.savefig(path, dpi=120)
