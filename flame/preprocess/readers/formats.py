"""The formats that a build reads: an entry here and a function are all that a new one needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flame.errors import InputError
from flame.preprocess.plan import Piece
from flame.preprocess.readers.arrow import read_arrow
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.csv import read_csv
from flame.preprocess.readers.lines import read_jsonl, read_txt
from flame.preprocess.readers.parquet import read_parquet
from flame.preprocess.rejects import Rejects
from flame.preprocess.remote import is_pinned, is_remote
from flame.preprocess.storage import FileState, state_of
from flame.preprocess.texts import Documents

READERS: dict[str, Callable[[Piece, Columns, Rejects], Iterator[Documents]]] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
    "jsonl": read_jsonl,
    "txt": read_txt,
    "csv": read_csv,
    "tsv": read_csv,
}


def read_piece(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of a piece; `InputError` if its file is no longer the one that was planned."""
    check_unchanged(piece)
    documents = READERS[piece.format](piece, columns, rejects)
    return _checked_again(documents, piece) if is_remote(piece.path) else documents


def _checked_again(documents: Iterator[Documents], piece: Piece) -> Iterator[Documents]:
    """Yield the documents of a remote piece, whose file might change under the hands of who reads it."""
    yield from documents
    check_unchanged(piece)


def check_unchanged(piece: Piece) -> None:
    """Raise `InputError` if the file of a piece is no longer the one that was planned."""
    if is_pinned(piece.path):
        return
    try:
        found = state_of(piece.path)
    except FileNotFoundError as error:
        raise InputError(
            "an input file is gone", where=piece.path, fix="Put it back, then run the build again"
        ) from error
    planned = FileState(size_bytes=piece.size_bytes, mtime_ns=piece.mtime_ns, etag=piece.etag)
    if found != planned:
        raise InputError(
            "an input file changed after the build was planned",
            where=piece.path,
            got=found,
            expected=f"{planned}, as it was planned",
            fix="Put the old file back, or build into a new folder",
        )
