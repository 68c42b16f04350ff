"""Where input files lie, a disk or a remote store: their state, to tell a changed one, and their bytes."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from flame.preprocess import remote
from flame.preprocess.remote import RemoteFile, is_remote


@dataclass(frozen=True, kw_only=True)
class FileState:
    """What tells one version of a file from another: size, and time of change or the store's etag."""

    size_bytes: int
    mtime_ns: int
    etag: str | None = None

    def __str__(self) -> str:
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.mtime_ns // 10**9))
        return f"{self.size_bytes:,} bytes, " + (f"etag {self.etag}" if self.etag else f"written at {written}")


def state_of(path: str) -> FileState:
    """Return the state of a file as it is now; `FileNotFoundError` where there is none."""
    if is_remote(path):
        size, etag = remote.describe(path, fresh=True)
        return FileState(size_bytes=size, mtime_ns=0, etag=etag)
    found = Path(path).stat()
    return FileState(size_bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def open_file(path: str, *, read_ahead: bool = True) -> BinaryIO:
    """Open a file to read at any place.

    `read_ahead` is for who reads on: a remote file then comes in large parts, else as exactly what is asked for.
    """
    if not is_remote(path):
        return open(path, "rb")
    file = RemoteFile(path, remote.describe(path)[0])
    return cast(BinaryIO, io.BufferedReader(file, remote.READ_AHEAD_BYTES) if read_ahead else file)
