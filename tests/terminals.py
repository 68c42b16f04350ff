"""A pseudo-terminal to write to, and what would be seen on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

COLUMNS = 60


class Screen:
    """What a terminal was sent: `text` is all of it, `lines()` what stands there after it is drawn over."""

    def __init__(self) -> None:
        self.text = ""

    def lines(self) -> list[str]:
        """The screen's lines, from the first to that of the cursor; knows \\r, \\n, colours and erasing to the end."""
        lines, column = [""], 0
        for piece in re.findall(r"\033\[[0-9;]*[A-Za-z]|[\r\n]|[^\033\r\n]+", self.text):
            if piece == "\n":
                lines.append("")
                column = 0
            elif piece == "\r":
                column = 0
            elif piece == "\033[K":
                lines[-1] = lines[-1][:column]
            elif not piece.startswith("\033"):
                line = lines[-1].ljust(column)
                lines[-1] = line[:column] + piece + line[column + len(piece) :]
                column += len(piece)
        return lines


@contextmanager
def terminal(columns: int = COLUMNS) -> Iterator[tuple[TextIO, Screen]]:
    """Give a file that is a terminal of so many columns, and its screen, complete once the block is left."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen = Screen()
    received: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(reader, 4096):
                received.append(data)
        except OSError:  # its other end is closed, and all is read
            return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with open(writer, "w", encoding="utf-8") as file:
            yield file, screen
    finally:
        thread.join()
        os.close(reader)
        screen.text = b"".join(received).decode().replace("\r\n", "\n")
