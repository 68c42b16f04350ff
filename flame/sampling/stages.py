"""A mixture of several stages for people: a stage a column, the level steps of a ramp as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flame.sampling.mixture import Mixture, Stage
from flame.sampling.plan import SourcePlan

_ROUNDING = 2  # slots that a whole-number weight's difference may be off by
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))

# How a source is told in a column: from its plans in the stages of the column.
Cell = Callable[[Sequence[SourcePlan]], str]


def ramps(stages: Sequence[Stage]) -> list[range]:
    """Return the stages, in order, in groups: those of a ramp together, every other alone.

    A ramp is two or more stages of one length whose weights change by one amount from each to the next, and by half of
    it from the stage before and to the stage after.
    """
    groups: list[range] = []
    first = 0
    while first < len(stages):
        stop = _ramp_stop(stages, first) if first else first + 1
        groups.append(range(first, stop))
        first = stop
    return groups


def _ramp_stop(stages: Sequence[Stage], first: int) -> int:
    """Return where the ramp ends that begins with stage `first`; the next stage where none does."""
    stop = first + 1
    while stop + 1 < len(stages) and _is_step(stages, first, stop):
        stop += 1
    whole = stop > first + 1 and stop < len(stages)
    if whole and _is_half(stages, first - 1, first) and _is_half(stages, stop - 1, first):
        return stop
    return first + 1


def _is_step(stages: Sequence[Stage], first: int, number: int) -> bool:
    """Tell whether stage `number` goes on from the one before as that which follows `first` does."""
    length = stages[first + 1].start_tokens - stages[first].start_tokens
    own = stages[number + 1].start_tokens - stages[number].start_tokens
    change, expected = _change(stages, number - 1), _change(stages, first)
    same = all(abs(a - b) <= 2 * _ROUNDING for a, b in zip(change, expected, strict=True))
    return abs(own - length) <= 1 and same and any(change)


def _is_half(stages: Sequence[Stage], number: int, first: int) -> bool:
    return all(
        abs(2 * a - b) <= 3 * _ROUNDING for a, b in zip(_change(stages, number), _change(stages, first), strict=True)
    )


def _change(stages: Sequence[Stage], number: int) -> list[int]:
    """Return how each source's weight changes from stage `number` to the next."""
    return [b - a for a, b in zip(stages[number].weights, stages[number + 1].weights, strict=True)]


def stage_tables(mixture: Mixture, plans: Sequence[Sequence[SourcePlan]], width: int) -> Iterator[list[list[str]]]:
    """Yield tables of a mixture's stages, a row a source and a column a stage or ramp, none wider than `width`.

    Each has the rows of the proportions, and, where they are known, of the shares of documents, the tokens drawn and
    the epochs from the run's beginning to the column's end.
    """
    groups = ramps(mixture.stages)
    columns = [_column(mixture, plans, group) for group in groups]
    labels = ["stage", "from token"]
    for title in _titles(plans):
        labels += ["", title, *(f"  {source.name}" for source in mixture.sources)]
    first = 0
    while first < len(columns):
        left, stop = width - max(map(len, labels)), first
        while stop < len(columns) and (stop == first or left >= 2 + max(map(len, columns[stop]))):
            left -= 2 + max(map(len, columns[stop]))
            stop += 1
        yield [list(row) for row in zip(labels, *columns[first:stop], strict=True)]
        first = stop


def _column(mixture: Mixture, plans: Sequence[Sequence[SourcePlan]], group: range) -> list[str]:
    name = str(group.start) if len(group) == 1 else f"ramp {group.start}-{group.stop - 1}"
    cells = [name, short_count(mixture.stages[group.start].start_tokens)]
    for title in _titles(plans):
        rows = [[plans[stage][source] for stage in group] for source in range(len(mixture.sources))]
        cells += ["", "", *(_CELLS[title](row) for row in rows)]
    return cells


def _titles(plans: Sequence[Sequence[SourcePlan]]) -> list[str]:
    """Return which kinds of rows have anything to tell."""
    rows = [row for plan in plans for row in plan]
    known = {
        "of documents": any(row.share_of_documents is not None for row in rows),
        "tokens drawn": any(row.tokens_drawn is not None for row in rows),
        "epochs by then": any(row.epochs is not None for row in rows),
    }
    return [title for title in _CELLS if known.get(title, True)]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.4f}" if len(known) == len(values) else "-"


def _drawn(row: Sequence[SourcePlan]) -> str:
    drawn = [plan.tokens_drawn for plan in row]
    return "-" if None in drawn else short_count(sum(tokens or 0 for tokens in drawn))


_CELLS: dict[str, Cell] = {
    "proportion": lambda row: _mean([plan.proportion for plan in row]),
    "of documents": lambda row: _mean([plan.share_of_documents for plan in row]),
    "tokens drawn": _drawn,
    "epochs by then": lambda row: "-" if row[-1].epochs is None else f"{row[-1].epochs:.3f}",
}


def short_count(value: int) -> str:
    """Return a count with about four digits, as `10B` or `57.5M`; exact where it is below 10,000."""
    if value < 10_000:
        return str(value)
    for unit, name in _UNITS:
        if value >= unit:
            digits = max(0, 4 - len(str(value // unit)))
            shown = (2 * value * 10**digits + unit) // (2 * unit)  # the nearest, exactly
            return f"{shown / 10**digits:.{digits}f}".rstrip("0").rstrip(".") + name if digits else f"{shown}{name}"
    raise AssertionError("a count of 10,000 or more has a unit")
