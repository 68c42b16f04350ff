"""Histograms and tables for a terminal: no colour, as wide as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flame.preprocess.distribution import Bin

EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int, *, ascii_only: bool) -> str:
    """Return a bar of `share` (0 to 1) of `width` characters; what is above 0 is seen."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    if ascii_only:
        return "#" * -(-eighths // 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def histogram(bins: Sequence[Bin], *, width: int, ascii_only: bool) -> Iterator[str]:
    """Yield a line a power of two: from, to, a bar of the count, the count, its share, and the share of the sum."""
    count, total = sum(found.count for found in bins), sum(found.sum for found in bins)
    rows = [
        (
            f"{found.low:,}",
            f"{found.high:,}",
            f"{found.count:,}",
            f"{found.count / count:.1%}",
            f"{found.sum / total if total else 0:.1%}",
        )
        for found in bins
    ]
    low, high, number, share, weight = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = max(8, width - 2 - low - 3 - high - 1 - 1 - number - 2 - share - 2 - weight)
    most = max(found.count for found in bins)
    for found, row in zip(bins, rows, strict=True):
        drawn = bar(found.count / most, room, ascii_only=ascii_only)
        dash = "-" if ascii_only else "–"
        yield (
            f"  {row[0]:>{low}} {dash} {row[1]:>{high}} {drawn:<{room}} "
            f"{row[2]:>{number}}  {row[3]:>{share}}  {row[4]:>{weight}}"
        )


def table(rows: Sequence[Sequence[str]], *, width: int) -> Iterator[str]:
    """Yield rows, numbers to the right; the last cell, a text, is cut at its start so that the line fits."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    room = max(12, width - 2 - sum(widths) - 2 * len(widths))
    for row in rows:
        text = row[-1] if len(row[-1]) <= room else "..." + row[-1][len(row[-1]) - room + 3 :]
        yield "  " + "  ".join([*(cell.rjust(wide) for cell, wide in zip(row, widths, strict=False)), text])
