"""A `.npy` file that is written once, in order, hashed on the way, and published by rename."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from flame.files import named_disk_errors, publish, temporary_path
from flame.shards.format import HEADER_BYTES, npy_header

WRITE_BUFFER_BYTES = 1 << 20


class ArrayFile:
    """One `.npy` file being written: appended to, hashed, then sealed with its true length.

    `append` takes values of `dtype`; the checksum is xxh3-128 of the payload, after the header.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.path = path
        self.length = 0
        self._dtype = dtype
        self._digest = xxhash.xxh3_128()
        self._temporary = temporary_path(path)
        with named_disk_errors(path, HEADER_BYTES):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._temporary, "wb", buffering=WRITE_BUFFER_BYTES)  # noqa: SIM115
            self._file.write(npy_header(dtype, 0))

    def append(self, values: NDArray[np.unsignedinteger]) -> None:
        """Write `values` (1-D) behind the others."""
        assert values.ndim == 1 and np.can_cast(values.dtype, self._dtype, "safe"), "values of the file's own type"
        if len(values) == 0:
            return
        data = np.ascontiguousarray(values, dtype=self._dtype).data.cast("B")
        self._digest.update(data)
        with named_disk_errors(self.path, len(data)):
            self._file.write(data)
        self.length += len(values)

    def seal(self) -> str:
        """Patch the header, make the bytes durable, close; returns the checksum. The name is still temporary."""
        with named_disk_errors(self.path, WRITE_BUFFER_BYTES):
            self._file.flush()
            os.pwrite(self._file.fileno(), npy_header(self._dtype, self.length), 0)
            os.fsync(self._file.fileno())
            self._file.close()
        return f"xxh3:{self._digest.hexdigest()}"

    def publish(self) -> None:
        """Give the sealed file its name."""
        publish(self._temporary, self.path)

    def abort(self) -> None:
        """Close and delete what was written."""
        with contextlib.suppress(OSError):
            self._file.close()  # flushes, and a full disk may be why this is aborted
        self._temporary.unlink(missing_ok=True)
