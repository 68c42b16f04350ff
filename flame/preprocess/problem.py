"""One thing that is wrong with a file of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flame.errors import FlameError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with a file, and with which bytes of it: [start, stop), None where no bytes can be told."""

    path: Path
    text: str
    bytes: tuple[int, int] | None = None


def told(error: FlameError) -> str:
    """Return what an error says but for the path, which a finding begins with."""
    facts = [
        f"{name} {value}" for name, value in (("got", error.got), ("expected", error.expected)) if value is not None
    ]
    return error.what + (f" ({'; '.join(facts)})" if facts else "")
