"""torch's distributed checkpoint writer, which also says the size and checksum of every file that this rank wrote.

Checksums are made of the bytes on their way to the disk, so that saving reads nothing back.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from flame.train.checkpoint_files import FileRecord


class HashingWriter(FileSystemWriter):
    """Writes one file a rank into `path` (fsynced), then tells their records and the disk's first refusal, if any."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing

    @property
    def records(self) -> dict[str, FileRecord]:
        """The files that this rank wrote, by name."""
        return dict(self._hashing.records)

    @property
    def disk_error(self) -> OSError | None:
        """The first error of the file system: torch's archive writer hides it behind one of its own."""
        return self._hashing.error


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "the writer only writes"
        with self.remembered_errors(), super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream, self)
            yield cast(io.IOBase, hashing)
        self.records[Path(path).name] = hashing.record()

    @contextmanager
    def remembered_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingStream:
    """The part of a binary file that the writer uses; every byte goes through the checksum."""

    def __init__(self, stream: io.IOBase, owner: _HashingFileSystem) -> None:
        self._stream: Any = stream
        self._owner = owner
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        with self._owner.remembered_errors():
            written: int = self._stream.write(data)
        self._digest.update(data)
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        with self._owner.remembered_errors():
            self._stream.flush()

    def fileno(self) -> int:
        # The writer asks for the descriptor in order to fsync it, and has not always flushed before.
        self.flush()
        descriptor: int = self._stream.fileno()
        return descriptor

    def close(self) -> None:
        self._stream.close()

    def record(self) -> FileRecord:
        return FileRecord(size=self._size, xxh3=self._digest.hexdigest())
