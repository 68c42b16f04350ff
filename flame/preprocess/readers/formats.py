"""The formats that a build reads: an entry here and a function are all that a new one needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flame.errors import InputError
from flame.preprocess.plan import Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.lines import read_jsonl, read_txt
from flame.preprocess.readers.parquet import read_parquet
from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import Documents

READERS: dict[str, Callable[[Piece, Columns, Rejects], Iterator[Documents]]] = {
    "parquet": read_parquet,
    "jsonl": read_jsonl,
    "txt": read_txt,
}


def read_piece(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of a piece; `InputError` if its file is no longer the one that was planned."""
    check_unchanged(piece)
    return READERS[piece.format](piece, columns, rejects)


def check_unchanged(piece: Piece) -> None:
    """Raise `InputError` if the file of a piece is no longer the one that was planned."""
    try:
        found = Path(piece.path).stat()
    except FileNotFoundError as error:
        raise InputError(
            "an input file is gone", where=piece.path, fix="Put it back, then run the build again"
        ) from error
    if (found.st_size, found.st_mtime_ns) != (piece.size_bytes, piece.mtime_ns):
        raise InputError(
            "an input file changed after the build was planned",
            where=piece.path,
            got=f"{found.st_size} bytes",
            expected=f"the {piece.size_bytes} bytes that were planned, untouched",
            fix="Put the old file back, or build into a new folder",
        )
