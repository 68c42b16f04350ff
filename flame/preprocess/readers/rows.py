"""Rows of columnar files: what a column's name means, and the documents of a piece, group of rows by group of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flame.errors import InputError
from flame.preprocess.plan import Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.rejects import Rejects
from flame.preprocess.remote import RemoteError
from flame.preprocess.terminal import joined_lines
from flame.preprocess.texts import BATCH_BYTES, BATCH_DOCUMENTS, Documents, is_list_type, make_documents, utf8_texts
from flame.preprocess.where_arrow import is_string_type, kept_rows

T = TypeVar("T")


def field_of(schema: pa.Schema, name: str) -> pa.Field | None:
    """Return the field that `name` means (a column so called, else `a.b` inside the struct `a`), None for none."""
    if name in schema.names:
        return schema.field(schema.names.index(name))
    first, *rest = name.split(".")
    if first not in schema.names:
        return None
    field = schema.field(first)
    for part in rest:
        if not pa.types.is_struct(field.type) or field.type.get_field_index(part) < 0:
            return None
        field = field.type.field(part)
    return field if rest else None


def is_text_type(kind: pa.DataType) -> bool:
    """Whether a column of this type may hold texts.

    It may where it holds strings or bytes, dictionaries or lists of them, or nothing but nulls.
    """
    if pa.types.is_dictionary(kind):
        return is_text_type(kind.value_type)
    if is_list_type(kind):
        return is_text_type(kind.value_type) and not is_list_type(kind.value_type)
    return is_string_type(kind) or pa.types.is_null(kind)


def opened(open_whole: Callable[[str], T], path: str, rejects: Rejects) -> T | None:
    """Return what `open_whole` makes of a file; a damaged one is malformed input, and None. Raises `RemoteError`."""
    try:
        return open_whole(path)
    except RemoteError:
        raise
    except InputError as error:
        rejects.malformed("corrupt", error.what, path=path, row=0, place=lambda: "the whole file")
        return None


def read_groups(
    sizes: Sequence[tuple[int, int]],
    batches_of: Callable[[int, int], Iterator[pa.RecordBatch]],
    piece: Piece,
    columns: Columns,
    rejects: Rejects,
    may_match: Callable[[int], bool] = lambda _: True,
) -> Iterator[Documents]:
    """Yield the documents of the piece's groups of rows; a damaged group is malformed input.

    `sizes` are the (rows, about the bytes of text) of every group, and `batches_of(group, rows)` reads one of them,
    at most so many rows at a time. A group that cannot hold a row that --where keeps is not read.
    """
    row = piece.first_row
    assert piece.stop is not None, "a piece of rows ends at a group"
    for group in range(piece.start, piece.stop):
        num_rows, text_bytes = sizes[group]
        end = row + num_rows if piece.row_limit is None else min(row + num_rows, piece.row_limit)
        if not may_match(group):
            rejects.count("where", end - row)
            yield _no_documents(text_bytes, piece, columns, rejects)
            row = end
            continue
        batches = batches_of(group, batch_rows(num_rows, text_bytes))
        for batch in _whole_batches(batches, row, piece, rejects):
            taken = batch.slice(0, max(end - row, 0))
            if taken.num_rows:
                progress = text_bytes * batch.num_rows // num_rows
                yield _documents(taken, row, progress, piece, columns, rejects)
            row += batch.num_rows
            if row >= end:
                break
        if row < end:
            rejects.count("corrupt", end - row - 1)  # one is counted where the damage is told
        row = end


def batch_rows(num_rows: int, text_bytes: int) -> int:
    """Return how many rows are read at once: a number that the file alone decides."""
    average = max(text_bytes // max(num_rows, 1), 1)
    return min(max(BATCH_BYTES // average, 1), BATCH_DOCUMENTS)


def _whole_batches(
    batches: Iterator[pa.RecordBatch], row: int, piece: Piece, rejects: Rejects
) -> Iterator[pa.RecordBatch]:
    try:
        for batch in batches:
            row += batch.num_rows
            yield batch
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        rejects.malformed(
            "corrupt",
            f"the {piece.format} file is damaged: {arrow_words(error)}",
            path=piece.path,
            row=row,
            place=lambda: f"in or after row {row}",
        )


def _documents(
    batch: pa.RecordBatch, first_row: int, progress_bytes: int, piece: Piece, columns: Columns, rejects: Rejects
) -> Documents:
    rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.uint64)
    if columns.where is not None:
        chosen = kept_rows(columns.where, batch.num_rows, lambda name: select(batch, name))
        rejects.count("where", int(np.count_nonzero(~chosen)))
        batch, rows = batch.filter(pa.array(chosen)), rows[chosen]
    texts, keep = utf8_texts(select(batch, columns.text), rows, rejects, path=piece.path)
    kept = None
    if columns.kept_names:
        arrays = [_kept_array(batch, field) for field in columns.kept]
        kept = pa.table(arrays, schema=columns.kept)
    if keep is not None:
        rows = rows[keep]
        kept = kept.filter(pa.array(keep)) if kept is not None else None
    return make_documents(texts, rows, kept, rejects, path=piece.path, progress_bytes=progress_bytes)


def _no_documents(progress_bytes: int, piece: Piece, columns: Columns, rejects: Rejects) -> Documents:
    return make_documents(
        pa.array([], pa.large_string()),
        np.zeros(0, np.uint64),
        columns.kept.empty_table() if columns.kept_names else None,
        rejects,
        path=piece.path,
        progress_bytes=progress_bytes,
    )


def select(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the column that `name` means, as `field_of` finds it; a null struct holds null."""
    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    return pc.struct_field(batch.column(first), rest)


def _kept_array(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field_of(batch.schema, field.name) is None:
        return pa.nulls(batch.num_rows, field.type)
    array = select(batch, field.name)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(field.type)


def arrow_words(error: Exception) -> str:
    """Return what an error of Arrow's says: on one line, without control characters and the last full stop."""
    return joined_lines(str(error)).removesuffix(".")
