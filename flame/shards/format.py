"""Names and bytes of a shard on disk: format version 1 (docs/format.md).

A shard is two plain `.npy` files, tokens and document ends, whose headers are padded to exactly 128 bytes: written
first with room for any length and patched at the end, so that a shard is written once, in order.
"""

from __future__ import annotations

import ast
import os
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

_MAGIC = b"\x93NUMPY\x01\x00"


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
    except FileNotFoundError as error:
        raise CorpusError("a file of the corpus is absent", where=path, fix=REBUILD) from error
    length = _length_in_header(header, dtype)
    if length is None:
        raise CorpusError(
            "a file of the corpus has no header of ours",
            where=path,
            got=repr(header[:40]),
            expected=f"a .npy header of {HEADER_BYTES} bytes for 1-D {dtype.str}",
            fix=REBUILD,
        )
    expected_bytes = HEADER_BYTES + length * dtype.itemsize
    if size_bytes != expected_bytes:
        raise CorpusError(
            "a file of the corpus has the wrong size: it was cut or written over",
            where=path,
            got=f"{size_bytes} bytes",
            expected=f"{expected_bytes} bytes, for the {length} values that its header names",
            fix=REBUILD,
        )
    return length


REBUILD = "Restore the file from a copy, or build the corpus again"


def _length_in_header(header: bytes, dtype: np.dtype[np.unsignedinteger]) -> int | None:
    if len(header) != HEADER_BYTES or not header.startswith(_MAGIC):
        return None
    try:
        description = ast.literal_eval(header[len(_MAGIC) + 2 :].decode("ascii"))
        (length,) = description["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None
    return int(length) if header == npy_header(dtype, length) else None


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
