"""Texts of parquet files, row group by row group, in bounded memory: only the named columns are read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flame.errors import InputError
from flame.preprocess.plan import Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import BATCH_BYTES, BATCH_DOCUMENTS, Documents, make_documents, utf8_texts

READ_BUFFER_BYTES = 2**20


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a parquet file; `InputError` where it is none."""
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            "a file is no readable parquet file",
            where=path,
            got=_one_line(error),
            fix="Fetch it again, or leave it out",
        ) from error


def field_of(schema: pa.Schema, name: str) -> pa.Field | None:
    """Return the field that `name` means (a column so called, else `a.b` inside the struct `a`), None for none."""
    if name in schema.names:
        return schema.field(name)
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
    """Whether a column of this type may hold texts: strings, bytes, dictionaries of them, or nothing but nulls."""
    if pa.types.is_dictionary(kind):
        return is_text_type(kind.value_type)
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_null,
    )
    return any(test(kind) for test in tests)


def group_sizes(file: pq.ParquetFile, text_column: str) -> tuple[tuple[int, int], ...]:
    """Return (rows, uncompressed bytes of the text column) of each row group."""
    metadata = file.metadata
    leaf = next(index for index in range(metadata.num_columns) if file.schema.column(index).path == text_column)
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    return tuple((group.num_rows, group.column(leaf).total_uncompressed_size) for group in groups)


def read_parquet(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of the piece's row groups; a damaged page or file is malformed input."""
    try:
        file = open_parquet(piece.path)
    except InputError as error:
        what = f"{error.what}: {error.got}"
        rejects.malformed("corrupt", what, path=piece.path, row=0, place=lambda: "the whole file")
        return
    wanted = [columns.text, *(name for name in columns.kept_names if field_of(file.schema_arrow, name) is not None)]
    sizes = group_sizes(file, columns.text)
    row = piece.first_row
    assert piece.stop is not None, "a parquet piece ends at a row group"
    for group in range(piece.start, piece.stop):
        num_rows, text_bytes = sizes[group]
        end = row + num_rows if piece.row_limit is None else min(row + num_rows, piece.row_limit)
        step = batch_rows(num_rows, text_bytes)
        batches = file.iter_batches(batch_size=step, row_groups=[group], columns=wanted, use_threads=False)
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
            f"a parquet file is damaged: {_one_line(error)}",
            path=piece.path,
            row=row,
            place=lambda: f"in or after row {row}",
        )


def _documents(
    batch: pa.RecordBatch, first_row: int, progress_bytes: int, piece: Piece, columns: Columns, rejects: Rejects
) -> Documents:
    rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.uint64)
    texts, keep = utf8_texts(select(batch, columns.text), rows, rejects, path=piece.path)
    kept = None
    if columns.kept_names:
        arrays = [_kept_array(batch, field) for field in columns.kept]
        kept = pa.table(arrays, schema=columns.kept)
    if keep is not None:
        rows = rows[keep]
        kept = kept.filter(pa.array(keep)) if kept is not None else None
    return make_documents(texts, rows, kept, rejects, path=piece.path, progress_bytes=progress_bytes)


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
