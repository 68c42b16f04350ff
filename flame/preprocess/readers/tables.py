"""What a file with named columns says of itself before it is read: its columns, and its groups of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from flame.errors import InputError
from flame.preprocess.readers.arrow import read_layout
from flame.preprocess.readers.csv import DELIMITERS, CsvFile
from flame.preprocess.readers.parquet import group_sizes, open_parquet
from flame.preprocess.readers.rows import field_of
from flame.preprocess.readers.stream import ByteStream, DamagedStreamError
from flame.preprocess.rejects import MEND_FILE


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file's columns, None where it has none because it is empty, and the (rows, bytes of text) of its groups.

    There are no groups where the text's column was not named, or is absent, or where rows are not counted (csv).
    """

    schema: pa.Schema | None
    groups: tuple[tuple[int, int], ...] = ()


def _parquet(path: str, _compression: str | None, text_column: str | None) -> Table:
    file = open_parquet(path)
    schema = file.schema_arrow
    known = text_column is not None and field_of(schema, text_column) is not None
    return Table(schema=schema, groups=group_sizes(file, text_column) if known and text_column else ())


def _arrow(path: str, _compression: str | None, _text_column: str | None) -> Table:
    layout = read_layout(path)
    return Table(schema=layout.schema, groups=layout.groups)


def _csv(path: str, compression: str | None, _text_column: str | None, format: str = "csv") -> Table:
    try:
        header = CsvFile(ByteStream(path, compression), format).header
    except DamagedStreamError as error:
        raise InputError(f"a file is no readable {format} file: {error}", where=path, fix=MEND_FILE) from error
    return Table(schema=pa.schema([pa.field(name, pa.string()) for name in header]) if header else None)


def _tsv(path: str, compression: str | None, text_column: str | None) -> Table:
    return _csv(path, compression, text_column, "tsv")


# path, compression, text column → what the file says. Raises `InputError` where it cannot be read.
TABLES: dict[str, Callable[[str, str | None, str | None], Table]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "csv": _csv,
    "tsv": _tsv,
}
UNTYPED = (*DELIMITERS, "jsonl", "txt")  # their values are strings
