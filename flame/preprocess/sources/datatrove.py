"""Token files of datatrove (`DocumentTokenizer` and its merger): NAME.ds with the ids, NAME.ds.index with the ends.

    NAME.ds            uint16 or uint32 ids
    NAME.ds.index      uint64 exclusive end of each document, in tokens, rising through the file
    NAME.ds.metadata   optional: tokenizer|bytes a token, number of tokens, the same for people
    NAME.ds.loss       optional: a byte a token, whether it counts in the loss

All little-endian. How wide an id is follows from the last end and the size of NAME.ds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

FORMAT = "datatrove"
METADATA, LOSS = ".metadata", ".loss"
END = np.dtype("<u8")
DTYPES: dict[int, np.dtype[np.integer]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes a token


def find(place: Path, split: str | None, keep_columns: Sequence[str]) -> tuple[tuple[InputFile, ...], Columns]:
    """Return the token files of a folder, or the one that is named, checked against their indexes."""
    return find_files(LAYOUT, place, split, keep_columns)


def read(piece: Piece, columns: Columns) -> Iterator[TokenRows]:
    """Yield the piece's documents."""
    return read_rows(LAYOUT, piece)


def open_tokens(tokens: Path, index: Path) -> TokenFile:
    """Map a token file and its index; `InputError` where their sizes do not agree."""
    ends = _open_index(index)
    num_tokens, size_bytes = int(ends[-1]) if len(ends) else 0, tokens.stat().st_size
    width = next((width for width in DTYPES if num_tokens * width == size_bytes), None)
    if width is None:
        raise mismatch(
            FORMAT,
            tokens,
            got=f"{size_bytes} bytes",
            expected=" or ".join(f"{width * num_tokens} bytes" for width in DTYPES)
            + f": {index.name} tells {num_tokens} tokens of 2 or 4 bytes",
            what="a token file was cut short, or is not the one that its index was written for",
        )

    def starts(first: int, stop: int) -> NDArray[np.int64]:
        before = ends[first - 1 : stop] if first else np.concatenate(([0], ends[:stop]))
        return before.astype(np.int64)

    return TokenFile(tokens=map_file(tokens, DTYPES[width], num_tokens), num_documents=len(ends), starts=starts)


def _open_index(path: Path) -> NDArray[np.integer]:
    size_bytes = path.stat().st_size
    if size_bytes % END.itemsize:
        raise mismatch(
            FORMAT,
            path,
            got=f"{size_bytes} bytes",
            expected=f"{END.itemsize} bytes a document",
            what="an index was cut short",
        )
    return map_file(path, END, size_bytes // END.itemsize)


def check(tokens: Path, index: Path) -> None:
    """Read the whole index, whose ends may not fall, and the metadata, where there are any."""
    if tokens.with_name(tokens.name + LOSS).exists():
        raise InputError(
            "a token file has a loss mask, which a corpus cannot keep",
            where=tokens.with_name(tokens.name + LOSS),
            fix=f"Move the {LOSS} files away if every token is to count in the loss",
        )
    ends = _open_index(index)
    document = first_fall(ends, CHECKED_AT_ONCE)
    if document is not None:
        raise mismatch(
            FORMAT,
            f"{index}, document {document}",
            got=f"an end at {ends[document]} tokens",
            expected=f"{ends[document - 1]} or more, where the one before ends",
            what="an index is damaged: a document ends before it begins",
        )
    _check_metadata(tokens, open_tokens(tokens, index))


def _check_metadata(tokens: Path, opened: TokenFile) -> None:
    """Refuse metadata that contradict the files."""
    path = tokens.with_name(tokens.name + METADATA)
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    width = lines[0].rpartition("|")[2].strip() if lines else ""
    told = (int(width) if width.isdecimal() else None, int(lines[1]) if lines[1:2] and lines[1].isdecimal() else None)
    found = (opened.tokens.dtype.itemsize if len(opened.tokens) else told[0], len(opened.tokens))
    for name, one, other in zip(("bytes a token", "tokens"), told, found, strict=True):
        if one is not None and one != other:
            raise mismatch(
                FORMAT,
                path,
                got=f"{one} {name}",
                expected=f"{other} {name}, as the files themselves tell",
                what="the metadata of a token file contradict it",
            )


LAYOUT = Layout(
    name=FORMAT,
    tokens=".ds",
    index=".ds.index",
    open=open_tokens,
    check=check,
    beside=(METADATA, LOSS),
)
