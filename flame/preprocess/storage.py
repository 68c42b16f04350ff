"""Where input files lie, a disk or a remote store: their state, to tell a changed one, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True, kw_only=True)
class FileState:
    """What tells one version of a file from another: size, and time of change or the store's etag."""

    size_bytes: int
    mtime_ns: int
    etag: str | None = None


def state_of(path: str) -> FileState:
    """Return the state of a file as it is now; `FileNotFoundError` where there is none."""
    found = Path(path).stat()
    return FileState(size_bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def open_file(path: str) -> BinaryIO:
    """Open a file to read at any place."""
    return open(path, "rb")
