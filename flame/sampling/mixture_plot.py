"""A mixture as a picture, by matplotlib (the extra `plot`): the proportions of its sources over the run, stacked."""

from __future__ import annotations

from pathlib import Path

from flame.sampling.interleave import TABLE_SLOTS
from flame.sampling.mixture import Mixture
from flame.sampling.stages import short_count

_MOST_AREAS = 20  # as many as colours can tell apart


def plot(path: Path, mixture: Mixture, num_tokens: int, *, title: str) -> None:
    """Draw what share of the tokens each source has, from the run's beginning to its end at `num_tokens`."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    edges, areas = proportions_over_tokens(mixture, num_tokens)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    colours = [colormaps["tab20"](i % 20) for i in range(len(areas))]
    axis.stackplot(edges, list(areas.values()), labels=list(areas), colors=colours)
    axis.set(xlim=(0, num_tokens), ylim=(0, 1), xlabel="tokens of the run", ylabel="proportion of tokens", title=title)
    axis.xaxis.set_major_formatter(lambda tokens, _: short_count(round(tokens)))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, fontsize="small")
    figure.savefig(path, dpi=120)


def proportions_over_tokens(mixture: Mixture, num_tokens: int) -> tuple[list[int], dict[str, list[float]]]:
    """Return the tokens at which stages begin and end, and each source's proportion there; the smallest as one."""
    begun = [stage for stage in mixture.stages if stage.start_tokens < num_tokens]
    starts = [stage.start_tokens for stage in begun]
    edges = [edge for start, stop in zip(starts, [*starts[1:], num_tokens], strict=True) for edge in (start, stop)]
    lengths = [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    of_source = [[stage.weights[i] / TABLE_SLOTS for stage in begun] for i in range(len(mixture.sources))]
    drawn = [sum(share * length for share, length in zip(s, lengths, strict=True)) for s in of_source]
    large = sorted(range(len(drawn)), key=lambda i: -drawn[i])
    if len(large) > _MOST_AREAS:
        large = large[: _MOST_AREAS - 1]
    areas = {mixture.sources[i].name: _stairs(of_source[i]) for i in sorted(large)}
    others = [of_source[i] for i in range(len(drawn)) if i not in large]
    if others:
        areas[f"{len(others)} others"] = _stairs([sum(shares) for shares in zip(*others, strict=True)])
    return edges, areas


def _stairs(levels: list[float]) -> list[float]:
    return [level for level in levels for _ in range(2)]
