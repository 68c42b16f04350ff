"""Token files of Megatron-LM and megatron-core (`IndexedDataset`): NAME.bin with the ids, NAME.idx with the boundaries.

    NAME.idx   b"MMIDIDX\\0\\0", uint64 version (1), uint8 dtype code, uint64 sequences, uint64 document indices;
               int32 length of each sequence, in tokens; int64 where it begins, in bytes of NAME.bin;
               int64 document indices: the first sequence of each document, and the number of sequences

All little-endian. A document is one sequence or several (sentences, say), and its ids lie one behind the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flame.errors import InputError
from flame.preprocess.plan import InputFile, Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.sources.indexed import (
    CHECKED_AT_ONCE,
    Layout,
    TokenFile,
    find_files,
    first_fall,
    map_file,
    mismatch,
    read_rows,
)
from flame.preprocess.sources.rows import TokenRows

FORMAT = "megatron"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are fractions
LENGTH, POINTER = np.dtype("<i4"), np.dtype("<i8")


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The mapped parts of an index."""

    dtype: np.dtype[np.integer]
    lengths: NDArray[np.integer]
    pointers: NDArray[np.integer]
    documents: NDArray[np.integer]


def find(place: Path, split: str | None, keep_columns: Sequence[str]) -> tuple[tuple[InputFile, ...], Columns]:
    """Return the token files of a folder or a prefix, checked against their indexes."""
    return find_files(LAYOUT, place, split, keep_columns)


def read(piece: Piece, columns: Columns) -> Iterator[TokenRows]:
    """Yield the piece's documents."""
    return read_rows(LAYOUT, piece)


def open_tokens(tokens: Path, index: Path) -> TokenFile:
    """Map a token file and its index; `InputError` where the sizes of both are not those that the header tells."""
    parts = _open_index(index)
    size_bytes = tokens.stat().st_size
    count = len(parts.lengths)
    expected = (int(parts.pointers[-1]) + int(parts.lengths[-1]) * parts.dtype.itemsize) if count else 0
    if size_bytes != expected:
        raise mismatch(
            FORMAT,
            tokens,
            got=f"{size_bytes} bytes",
            expected=f"{expected} bytes, as {index.name} tells",
            what="a token file was cut short, or is not the one that its index was written for",
        )

    def starts(first: int, stop: int) -> NDArray[np.int64]:
        sequences = parts.documents[first : stop + 1].astype(np.int64)
        if count == 0:
            return np.zeros(len(sequences), dtype=np.int64)
        places = parts.pointers[np.minimum(sequences, count - 1)].astype(np.int64)
        return np.where(sequences < count, places, size_bytes) // parts.dtype.itemsize

    return TokenFile(
        tokens=map_file(tokens, parts.dtype, size_bytes // parts.dtype.itemsize),
        num_documents=len(parts.documents) - 1,
        starts=starts,
    )


def _open_index(path: Path) -> _Index:
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC[: len(header)]) or len(header) < len(MAGIC):
        raise mismatch(
            FORMAT, path, got=repr(header[:9]), expected=repr(MAGIC), what="an index does not begin as Megatron's do"
        )
    if len(header) < HEADER.size:
        raise _cut(path, len(header), HEADER.size)
    _, version, code, num_sequences, num_indices = HEADER.unpack(header)
    if version != VERSION or code not in DTYPE_CODES:
        raise mismatch(
            FORMAT,
            path,
            got=f"version {version}" if version != VERSION else f"dtype code {code}",
            expected=f"version {VERSION}"
            if version != VERSION
            else ", ".join(f"{code} ({name})" for code, name in DTYPE_CODES.items()),
            what="an index is of another version" if version != VERSION else "an index tells no dtype of token ids",
        )
    size_bytes = path.stat().st_size
    expected = HEADER.size + num_sequences * (LENGTH.itemsize + POINTER.itemsize) + num_indices * POINTER.itemsize
    if num_sequences and size_bytes == expected + num_sequences:
        raise InputError(
            "the index tells a mode for each sequence: the data set is of several modalities",
            where=path,
            expected="token ids of text only",
        )
    if size_bytes != expected:
        raise _cut(path, size_bytes, expected)
    after_lengths = HEADER.size + num_sequences * LENGTH.itemsize
    return _Index(
        dtype=np.dtype(DTYPE_CODES[code]).newbyteorder("<"),
        lengths=map_file(path, LENGTH, num_sequences, HEADER.size),
        pointers=map_file(path, POINTER, num_sequences, after_lengths),
        documents=map_file(path, POINTER, num_indices, after_lengths + num_sequences * POINTER.itemsize),
    )


def _cut(path: Path, size_bytes: int, expected: int) -> InputError:
    return mismatch(
        FORMAT,
        path,
        got=f"{size_bytes} bytes",
        expected=f"{expected} bytes" + (", as its header tells" if size_bytes >= HEADER.size else " or more"),
        what="an index was cut short, or written over",
    )


def check(tokens: Path, index: Path) -> None:
    """Read the whole index: sequences lie one behind the other, and documents are runs of all of them."""
    parts = _open_index(index)
    count = len(parts.lengths)
    _check_documents(parts.documents, count, index)
    expected = 0
    for start in range(0, count, CHECKED_AT_ONCE):
        lengths = parts.lengths[start : start + CHECKED_AT_ONCE].astype(np.int64)
        pointers = parts.pointers[start : start + CHECKED_AT_ONCE]
        ends = expected + np.cumsum(lengths) * parts.dtype.itemsize
        begins = ends - lengths * parts.dtype.itemsize
        wrong = np.flatnonzero((lengths < 0) | (pointers != begins))
        if len(wrong):
            at = int(wrong[0])
            negative = lengths[at] < 0
            raise mismatch(
                FORMAT,
                f"{index}, sequence {start + at}",
                got=f"length {lengths[at]}" if negative else f"byte {pointers[at]}",
                expected="0 or more" if negative else f"byte {begins[at]}, where the one before ends",
                what="an index is damaged: " + ("a length is negative" if negative else "sequences do not join"),
            )
        expected = int(ends[-1])


def _check_documents(documents: NDArray[np.integer], num_sequences: int, index: Path) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != num_sequences:
        raise mismatch(
            FORMAT,
            index,
            got="none" if len(documents) == 0 else f"{documents[0]} to {documents[-1]}",
            expected=f"0 to {num_sequences}, the number of sequences",
            what="an index is damaged: its documents are not made of all sequences",
        )
    end = first_fall(documents, CHECKED_AT_ONCE)
    if end is not None:
        raise mismatch(
            FORMAT,
            f"{index}, document {end - 1}",
            got=f"sequences {documents[end - 1]} to {documents[end]}",
            expected="an end at or after the start",
            what="an index is damaged: a document ends before it begins",
        )


LAYOUT = Layout(name=FORMAT, tokens=".bin", index=".idx", open=open_tokens, check=check)
