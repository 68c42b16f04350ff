"""What a soak did, as lines that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class SoakError(Exception):
    """Something broke that a kill must not break."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One process that was stopped: how, when, how far it had come (tasks or steps), and its exit code."""

    signal: str
    moment: str
    at: int
    exit_code: int

    def __str__(self) -> str:
        return f"{self.signal:<20} {self.moment:<28} at {self.at:>4}   exit {self.exit_code}"


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def summary(what: str, unit: str, stops: Sequence[Stop]) -> str:
    """Return one line a kind of stop: how many, what they exited with, and between which tasks or steps they fell."""
    lines = [f"{what:<10} {'stopped by':<22} {'times':>5}   {'first and last at':<22} exit codes"]
    for kind in sorted({stop.signal for stop in stops}):
        chosen = [stop for stop in stops if stop.signal == kind]
        where = f"{unit} {min(stop.at for stop in chosen)} and {max(stop.at for stop in chosen)}"
        codes = ", ".join(f"{code} ×{n}" for code, n in sorted(Counter(stop.exit_code for stop in chosen).items()))
        lines.append(f"{'':<10} {kind:<22} {len(chosen):>5}   {where:<22} {codes}")
    return "\n".join(lines)
