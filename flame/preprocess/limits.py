"""Where a trial stops: `--limit_documents` and `--limit_bytes` take the first of the input, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flame.preprocess.plan import LINE_FORMATS, STREAM_FORMATS, InputFile
from flame.preprocess.readers.arrow import arrow_batches, read_layout
from flame.preprocess.readers.csv import CsvFile
from flame.preprocess.readers.parquet import open_parquet
from flame.preprocess.readers.rows import batch_rows, select
from flame.preprocess.readers.stream import ByteStream, DamagedStreamError, lines_between, range_stream
from flame.preprocess.texts import large_binary


def limited(
    files: Iterator[InputFile], text_column: str, limit_documents: int | None, limit_bytes: int | None
) -> Iterator[InputFile]:
    """Yield the files up to the document with which a limit is reached; refused documents count as well."""
    if limit_documents is None and limit_bytes is None:
        yield from files
        return
    documents_left = limit_documents if limit_documents is not None else 2**63
    bytes_left = limit_bytes if limit_bytes is not None else 2**63
    for file in files:
        if documents_left <= 0 or bytes_left <= 0:
            return
        file, documents, size = _measured(file, text_column, documents_left, bytes_left)
        documents_left -= documents
        bytes_left -= size
        yield file


def _measured(file: InputFile, text_column: str, documents_left: int, bytes_left: int) -> tuple[InputFile, int, int]:
    """Return the file cut where a limit falls, and the documents and bytes that it takes of them."""
    if file.format not in STREAM_FORMATS:
        return _measure_groups(file, text_column, documents_left, bytes_left)
    documents = size = 0
    try:
        for offset, num_bytes in _line_sizes(file) if file.format in LINE_FORMATS else _csv_sizes(file, text_column):
            if documents >= documents_left or size >= bytes_left:
                return dataclasses.replace(file, stop=offset), documents_left, bytes_left
            documents += 1
            size += num_bytes
    except DamagedStreamError:
        pass  # reading it for the build says so, under the user's policy
    return file, documents, size


def _measure_groups(
    file: InputFile, text_column: str, documents_left: int, bytes_left: int
) -> tuple[InputFile, int, int]:
    """Do so for groups of rows: whole ones are counted by what the file says; only where a limit falls one is read."""
    rows = size = 0
    for index, (group_rows, group_bytes) in enumerate(file.groups):
        if rows + group_rows >= documents_left or size + group_bytes >= bytes_left:
            taken, taken_bytes = _rows_within(file, index, text_column, documents_left - rows, bytes_left - size)
            if file.format == "parquet" or rows + taken >= documents_left or size + taken_bytes >= bytes_left:
                groups = (*file.groups[:index], (group_rows, taken_bytes))
                return dataclasses.replace(file, groups=groups, stop=rows + taken), documents_left, bytes_left
            group_bytes = taken_bytes  # of an arrow file's groups only the bytes of all columns were known
        rows, size = rows + group_rows, size + group_bytes
    return file, rows, size


def _rows_within(file: InputFile, group: int, text_column: str, rows_left: int, bytes_left: int) -> tuple[int, int]:
    rows = size = 0
    try:
        for batch in _batches(file, group, text_column):
            texts = large_binary(select(batch, text_column))
            ends = size + np.cumsum(pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False))
            within = min(int(np.searchsorted(ends, bytes_left)) + 1, rows_left - rows)
            if within <= len(ends):
                return rows + within, int(ends[within - 1])
            rows, size = rows + len(ends), int(ends[-1])
    except (pa.ArrowException, OSError):
        return file.groups[group]  # reading it for the build says so, under the user's policy
    return rows, size


def _batches(file: InputFile, group: int, text_column: str) -> Iterator[pa.RecordBatch]:
    rows = batch_rows(*file.groups[group])
    if file.format == "parquet":
        parquet = open_parquet(file.path)
        return parquet.iter_batches(batch_size=rows, row_groups=[group], columns=[text_column], use_threads=False)
    return arrow_batches(file.path, read_layout(file.path), group, rows, [text_column])


def _line_sizes(file: InputFile) -> Iterator[tuple[int, int]]:
    for offset, line in lines_between(range_stream(file.path, file.compression, 0), 0, None):
        if file.format == "txt" or (line and not line.isspace()):
            yield offset, len(line)


def _csv_sizes(file: InputFile, text_column: str) -> Iterator[tuple[int, int]]:
    table = CsvFile(ByteStream(file.path, file.compression), file.format)
    at = table.header.index(text_column) if table.header else 0
    for row in table.rows(None):
        yield row.offset, len(row.values[at].encode("utf-8", "surrogateescape")) if row.values else 0
