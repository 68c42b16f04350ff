"""What the trainer says while it runs: one logger, `flame`, to stderr; rank 0 speaks, the others only when worried.

On a terminal the latest step stands in one live line, and all else passes above it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

log = logging.getLogger("flame")

_ERASE = "\r\033[K"


class Console(logging.StreamHandler[TextIO]):
    """Writes records to a stream, and on a terminal keeps a live line below them.

    The cursor waits at the live line's beginning, so that what others print there is not appended to it.
    """

    def __init__(self, stream: TextIO, *, is_live: bool) -> None:
        super().__init__(stream)
        self.is_live = is_live
        self._line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record where the live line stands, and that line below it."""
        if self.is_live:
            self.stream.write(_ERASE)
        super().emit(record)
        if self._line:
            self._draw()

    def show(self, line: str) -> None:
        """Put `line` in place of the live line; an empty one erases it."""
        with self.lock or contextlib.nullcontext():
            self._line = line
            self._draw()

    def _draw(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone stops no run
            self.stream.write(f"{_ERASE}{self._line}\r" if self._line else _ERASE)
            self.stream.flush()


def configure_logging(rank: int, world_size: int, *, plain: bool = False) -> None:
    """Send `flame`'s records to stderr: everything from rank 0, warnings and worse from the others, named by rank.

    `plain` has no live line, wherever that is; nor has anything but a terminal, or one that calls itself dumb.
    """
    prefix = "" if world_size == 1 or rank == 0 else f"rank {rank}: "
    handler = Console(sys.stderr, is_live=not plain and sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False


def live_width() -> int | None:
    """Return how many characters a live line has room for; None where there is none."""
    console = _console()
    if console is None:
        return None
    try:
        columns = os.get_terminal_size(console.stream.fileno()).columns
        return max(20, columns - 1) if columns else 79  # 0: one that does not know
    except (OSError, ValueError):
        return 79


def show_live(line: str) -> None:
    """Put `line` in the place of the live line, if there is one."""
    console = _console()
    if console is not None:
        console.show(line)


@contextlib.contextmanager
def live_line_erased() -> Iterator[None]:
    """Erase the live line at the end of the block, however it ends."""
    try:
        yield
    finally:
        show_live("")


def _console() -> Console | None:
    return next((handler for handler in log.handlers if isinstance(handler, Console) and handler.is_live), None)
