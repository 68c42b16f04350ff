"""What is printed for people: as wide as their terminal, in characters that their locale knows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable

NARROWEST, WIDEST = 40, 160


def terminal_width() -> int:
    """Return the columns to fill: COLUMNS, else the terminal's own, else 100; never very few or very many."""
    return max(NARROWEST, min(shutil.get_terminal_size((100, 24)).columns, WIDEST))


def stdout_is_ascii() -> bool:
    """Tell whether stdout's encoding lacks block characters."""
    try:
        "█▏–…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def joined_lines(text: str) -> str:
    """Return a text on one line, without what a terminal would obey; the same whatever stdout can show."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def one_line(text: str) -> str:
    """Return `joined_lines` of a text, spelled in ASCII where stdout has no more."""
    line = joined_lines(text)
    return line.encode("ascii", "backslashreplace").decode() if stdout_is_ascii() else line


def cut(line: str, width: int) -> str:
    """Return a line that is no longer than `width`."""
    return line if len(line) <= width else line[: width - 3] + "..."


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; a character that stdout's encoding lacks is spelled with a backslash."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    for line in lines:
        print(line)


def write_utf8() -> None:
    """Let stdout take any text, whatever the locale says."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8")
