"""Provenance: docs.parquet beside a shard, a row a document, in the documents' order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flame.errors import CorpusError
from flame.files import fsync_file, named_disk_errors, publish, temporary_path
from flame.shards.format import RESTORE, unreadable_file

PROVENANCE_FIELDS = (
    pa.field("source_file", pa.string()),
    pa.field("row", pa.uint64()),
    pa.field("num_bytes", pa.uint32()),
)
ROW_GROUP_ROWS = 1 << 14
NO_PROVENANCE = "Look for documents by their numbers, or build the corpus with provenance, which is kept by default"
WAITING_BYTES = 1 << 26  # a row group of large kept columns is cut shorter


class ProvenanceFile:
    """One docs.parquet being written, in row groups of a fixed size: the same file, however its rows are appended.

    Kept in memory: the rows of one row group, 64 MiB at most (a file of larger rows has other row groups, and the same
    rows). `seal`, then `publish`; or `abort`, which leaves nothing behind.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._temporary = temporary_path(path)
        self._schema = schema
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._waiting_bytes = 0
        with named_disk_errors(path, 4):  # what such a file begins with
            # dictionaries (source_file) are parquet's own here; page checksums let `verify` see a flipped bit
            self._writer = pq.ParquetWriter(
                self._temporary,
                schema,
                compression="zstd",
                write_page_checksum=True,
                write_statistics=[field.name for field in PROVENANCE_FIELDS],  # kept columns may hold whole pages
            )

    def append(self, docs: pa.Table) -> None:
        """Append rows: the schema's columns, by name."""
        docs = docs.select(self._schema.names).cast(self._schema)
        self._waiting.append(docs)
        self._num_waiting += docs.num_rows
        self._waiting_bytes += docs.nbytes
        if self._waiting_bytes >= WAITING_BYTES:
            self._flush(self._num_waiting)
        elif self._num_waiting >= ROW_GROUP_ROWS:
            self._flush(self._num_waiting - self._num_waiting % ROW_GROUP_ROWS)

    def _flush(self, num_rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        self._write(table.slice(0, num_rows))
        rest = table.slice(num_rows)
        self._waiting, self._num_waiting, self._waiting_bytes = [rest], rest.num_rows, rest.nbytes

    def _write(self, table: pa.Table) -> None:
        with named_disk_errors(self._path, table.nbytes):
            self._writer.write_table(table.combine_chunks(), row_group_size=ROW_GROUP_ROWS)

    def seal(self) -> None:
        """Write what is left, make the bytes durable and close; the name is still temporary."""
        if self._num_waiting:
            self._flush(self._num_waiting)
        with named_disk_errors(self._path, self._temporary.stat().st_size):
            self._writer.close()
            fsync_file(self._temporary)

    def publish(self) -> None:
        """Give the sealed file its name."""
        publish(self._temporary, self._path)

    def abort(self) -> None:
        """Close and delete what was written."""
        try:
            self._writer.close()
        except OSError:
            pass  # closing writes a footer, and a full disk may be why this is aborted
        finally:
            self._temporary.unlink(missing_ok=True)


class ProvenanceReader:
    """Reads single rows, keeping the last row group: the rows of neighbours come from one read."""

    def __init__(self) -> None:
        self._last: tuple[Path, int, pa.Table] | None = None

    def row(self, path: Path, row: int, *, num_documents: int) -> dict[str, Any]:
        """Return a row as JSON has it (no NaN; times and bytes as text), {} where the file is absent.

        Raises `CorpusError` if the file cannot be read or has not `num_documents` rows. Cost: one row group.
        """
        last = self._last
        if last is None or last[0] != path or not 0 <= row - last[1] < last[2].num_rows:
            try:
                last = (path, *_row_group_of(path, row, num_documents))
            except FileNotFoundError:
                return {}
            except (OSError, ValueError, pa.ArrowException) as error:
                raise damaged(path, error) from error
            self._last = last
        table, place = last[2], row - last[1]
        return {name: _value(table.column(name)[place]) for name in table.column_names}


def scan_columns(
    path: Path, columns: Sequence[str], *, num_documents: int
) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield (its first row, these columns' values as JSON has them) of each row group: one in memory at a time.

    Raises `CorpusError` if the file is absent, lacks a column, cannot be read or has not `num_documents` rows.
    """
    if not path.is_file():
        raise CorpusError(
            "where the documents of a shard came from is not known", where=path, got="no such file", fix=NO_PROVENANCE
        )
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_num_rows(path, file, num_documents)
            names = file.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise CorpusError(
                        f"the documents of a shard have no column {column!r}",
                        where=path,
                        expected="one of " + ", ".join(names),
                        fix="Columns are kept by flame-preprocess build --keep_columns",
                    )
            first = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(columns))
                yield first, {name: _values(table.column(name)) for name in columns}
                first += table.num_rows
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged(path, error) from error


def _row_group_of(path: Path, row: int, num_documents: int) -> tuple[int, pa.Table]:
    """Return the row group that holds a row, and its own first row."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_num_rows(path, file, num_documents)
        first = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if row < first + num_rows:
                return first, file.read_row_group(group)
            first += num_rows
    raise CorpusError("the provenance of a shard has fewer rows than it says", where=path, fix=RESTORE)


def _check_num_rows(path: Path, file: pq.ParquetFile, num_documents: int) -> None:
    if file.metadata.num_rows != num_documents:
        raise CorpusError(
            "the provenance of a shard is not that of its documents",
            where=path,
            got=f"{file.metadata.num_rows} rows",
            expected=f"{num_documents} rows, one a document",
            fix=RESTORE,
        )


def damaged(path: Path, error: Exception) -> CorpusError:
    """Return the error for a docs.parquet that cannot be read."""
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable_file(path, error)
    detail = " ".join(str(error).split())
    return CorpusError("the provenance of a shard cannot be read", where=path, got=detail, fix=RESTORE)


def _value(scalar: pa.Scalar) -> Any:
    try:
        return as_json(scalar.as_py())
    except ValueError:  # nanoseconds, which Python's own times do not have
        return str(scalar.cast(pa.string())).replace(" ", "T")


def _values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return [as_json(value) for value in column.to_pylist()]
    except ValueError:
        return [_value(scalar) for scalar in column]


def as_json(value: Any) -> Any:
    """Return a value of a kept column as JSON can hold it: NaN and infinities become null, other types text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
