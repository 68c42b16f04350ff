"""Names and bytes of a shard on disk: format version 1 (docs/format.md).

A shard is two plain `.npy` files, tokens and document ends, whose headers are padded to exactly 128 bytes: written
first with room for any length and patched at the end, so that a shard is written once, in order.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from flame.errors import CorpusError

FORMAT_VERSION = 1
HEADER_BYTES = 128
TOKEN_DTYPE = np.dtype("<u4")
END_DTYPE = np.dtype("<u8")
DEFAULT_SHARD_TOKENS = 2**28

MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
BUILD_FOLDER = "build"
REJECTS_FOLDER = "rejects"
RESTORE = "Restore the file from a copy, or build the corpus again"

_MAGIC = b"\x93NUMPY\x01\x00"
_SHAPE = re.compile(rb"'shape': \(([0-9]{1,20}),\)")


def npy_header(dtype: np.dtype[np.unsignedinteger], length: int) -> bytes:
    """Return the 128-byte `.npy` (version 1.0) header of a 1-D little-endian array of `length` values."""
    description = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}".encode("ascii")
    room = HEADER_BYTES - len(_MAGIC) - 2
    assert len(description) < room, "the header has room for any 64-bit length"
    return _MAGIC + room.to_bytes(2, "little") + description.ljust(room - 1) + b"\n"


def read_npy_length(path: Path, dtype: np.dtype[np.unsignedinteger]) -> int:
    """Return the number of values of a file of ours; `CorpusError` unless its header and size agree.

    Cost: one open, a read of 128 bytes.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable_file(path, error) from error
    length = _length_in_header(header, dtype)
    if length is None:
        raise CorpusError(
            "a file of the corpus does not begin with a header of its format",
            where=path,
            got=repr(header[:40]) if header else "an empty file",
            expected=f"the {HEADER_BYTES}-byte .npy header of a 1-D array of {dtype.str}",
            fix=RESTORE,
        )
    expected_bytes = HEADER_BYTES + length * dtype.itemsize
    if size_bytes != expected_bytes:
        raise wrong_size(path, size_bytes, expected_bytes)
    return length


def _length_in_header(header: bytes, dtype: np.dtype[np.unsignedinteger]) -> int | None:
    if len(header) != HEADER_BYTES or not header.startswith(_MAGIC):
        return None
    match = _SHAPE.search(header)
    return int(match[1]) if match and header == npy_header(dtype, int(match[1])) else None


def unreadable_file(path: Path, error: OSError) -> CorpusError:
    """Return the error for a file of a corpus that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return CorpusError("a file of the corpus is absent", where=path, fix=RESTORE)
    return CorpusError(
        "a file of the corpus cannot be read",
        where=path,
        got=error.strerror or repr(error),
        fix="Check its permissions and its disk, and the limit on open files (ulimit -n)",
    )


def wrong_size(path: Path, got_bytes: int, expected_bytes: int) -> CorpusError:
    """Return the error for a file of a corpus that was cut, or grew."""
    return CorpusError(
        "a file of the corpus was cut short or written over",
        where=path,
        got=f"{got_bytes} bytes",
        expected=f"{expected_bytes} bytes",
        fix=RESTORE,
    )


def shard_name(task: int, part: int) -> str:
    """Return the name of a task's `part`-th shard, both 0-based."""
    return f"shard-{task:05d}-{part:03d}"


def tokens_path(corpus: Path, split: str, name: str) -> Path:
    """Return where a shard's tokens lie."""
    return corpus / split / f"{name}.tokens.npy"


def ends_path(corpus: Path, split: str, name: str) -> Path:
    """Return where a shard's document ends lie."""
    return corpus / split / f"{name}.ends.npy"


def docs_path(corpus: Path, split: str, name: str) -> Path:
    """Return where a shard's provenance lies: a row a document."""
    return corpus / split / f"{name}.docs.parquet"
