"""Texts of parquet files, row group by row group, in bounded memory: only the named columns are read."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from flame.errors import InputError
from flame.preprocess.plan import Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.rows import arrow_words, field_of, opened, read_groups
from flame.preprocess.rejects import MEND_FILE, Rejects
from flame.preprocess.remote import READ_AHEAD_BYTES, is_remote
from flame.preprocess.storage import open_file
from flame.preprocess.texts import Documents
from flame.preprocess.where_columns import group_may_match

READ_BUFFER_BYTES = 2**20


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a parquet file; `InputError` where it is none."""
    try:
        return pq.ParquetFile(
            open_file(path, read_ahead=False) if is_remote(path) else path,
            pre_buffer=False,
            buffer_size=READ_AHEAD_BYTES if is_remote(path) else READ_BUFFER_BYTES,
            page_checksum_verification=True,
        )
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            f"a file is no readable parquet file: {arrow_words(error)}", where=path, fix=MEND_FILE
        ) from error


def group_sizes(file: pq.ParquetFile, text_column: str) -> tuple[tuple[int, int], ...]:
    """Return (rows, uncompressed bytes of the text column) of each row group."""
    metadata = file.metadata
    paths = (file.schema.column(index).path for index in range(metadata.num_columns))
    leaf = next(index for index, path in enumerate(paths) if path == text_column or path.startswith(f"{text_column}."))
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    return tuple((group.num_rows, group.column(leaf).total_uncompressed_size) for group in groups)


def read_parquet(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of the piece's row groups; a damaged page or file is malformed input."""
    file = opened(open_parquet, piece.path, rejects)
    if file is None:
        return
    schema = file.schema_arrow
    wanted = columns.read_from(schema, field_of)

    def batches_of(group: int, rows: int) -> Iterator[pa.RecordBatch]:
        return file.iter_batches(batch_size=rows, row_groups=[group], columns=wanted, use_threads=False)

    def may_match(group: int) -> bool:
        return columns.where is None or group_may_match(columns.where, file, group)

    yield from read_groups(group_sizes(file, columns.text), batches_of, piece, columns, rejects, may_match)
