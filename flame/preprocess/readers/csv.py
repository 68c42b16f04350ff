"""Texts of csv and tsv files: a row a document, the first row names the columns, quoted fields may hold line breaks.

A quote can open anywhere, so that no place within such a file is known to begin a row: a file is read in one piece.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from flame.preprocess.plan import Piece
from flame.preprocess.readers.batch import StringBatch
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.stream import BOM, ByteStream, DamagedStreamError, raw_lines
from flame.preprocess.rejects import SAMPLE_BYTES, Rejects
from flame.preprocess.texts import Documents, decode_utf8
from flame.preprocess.where import Where, columns_of
from flame.preprocess.where_rows import WhereTypeError, keeps_row, typed_value

DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True, kw_only=True)
class CsvRow:
    """A row below the header: its 0-based number, its first line (1-based), the byte at which it begins.

    `values` still hold bytes that are no UTF-8 as surrogate escapes; where `trouble` says what is wrong they are empty.
    `beginning` is what its first bytes are, line ends included: as much as is shown of it.
    """

    number: int
    line: int
    offset: int
    values: list[str]
    beginning: bytes
    trouble: str | None = None


class CsvFile:
    """The header of a csv file, empty if the file is, and an iterator over its rows; blank lines are none."""

    def __init__(self, stream: ByteStream, format: str) -> None:
        csv.field_size_limit(sys.maxsize)
        self.next_row = 0
        self._line = 0
        self._offset = 0
        self._beginning = b""  # of the row that is read: a quote that never closes takes all the rest of the file
        self._reader = csv.reader(self._lines(stream), delimiter=DELIMITERS[format], strict=True)
        try:
            self.header = next((row for row in self._reader if row), [])
        except csv.Error as error:
            words = f"the row of column names is none: {_csv_words(error)}"
            raise DamagedStreamError("malformed_csv", words) from error

    def _lines(self, stream: ByteStream) -> Iterator[str]:
        for data in raw_lines(stream):
            text = (data.removeprefix(BOM) if self._offset == 0 else data).decode("utf-8", "surrogateescape")
            self._line += 1
            self._offset += len(data)
            if len(self._beginning) < SAMPLE_BYTES:
                self._beginning += data[:SAMPLE_BYTES]
            yield text

    def rows(self, stop: int | None) -> Iterator[CsvRow]:
        """Yield the rows that begin before the byte `stop`; raises `DamagedStreamError` after what could be read."""
        while stop is None or self._offset < stop:
            line, offset, trouble = self._line + 1, self._offset, None
            self._beginning = b""
            try:
                values = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                values, trouble = [], _csv_words(error)
            if not values and trouble is None:
                continue
            if trouble is None and len(values) != len(self.header):
                trouble = f"{len(values)} fields under {len(self.header)} column names"
                values = []
            yield CsvRow(
                number=self.next_row,
                line=line,
                offset=offset,
                values=values,
                beginning=self._beginning,
                trouble=trouble,
            )
            self.next_row += 1


def _csv_words(error: csv.Error) -> str:
    """Return what is wrong with a row, in words for those who did not write a parser."""
    if "unexpected end of data" in str(error):
        return "a quote opens in it that no other closes before the file ends"
    return "text follows a closing quote" if "expected after" in str(error) else str(error)


def read_csv(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of a csv file; a row with too many or too few fields, or a stray quote, is malformed."""
    stream = ByteStream(piece.path, piece.compression)
    batch = StringBatch(piece, columns, stream)
    file: CsvFile | None = None
    try:
        file = CsvFile(stream, piece.format)
        if not file.header:
            return
        text_at = file.header.index(columns.text)
        places = {name: file.header.index(name) for name in columns_of(columns.where)}
        kept_at = [file.header.index(name) if name in file.header else None for name in columns.kept_names]
        for row in file.rows(piece.stop):
            if (
                columns.where is not None
                and row.trouble is None
                and not _is_wanted(columns.where, row, places, piece, rejects)
            ):
                continue
            text = None if row.trouble is not None else _decoded(row.values[text_at], rejects)
            if text is None:
                if row.trouble is None:
                    _malformed("invalid_utf8", "a text is no valid UTF-8", row, piece, rejects)
                else:
                    what = f"a row of the {piece.format} file is malformed: {row.trouble}"
                    _malformed("malformed_csv", what, row, piece, rejects)
                continue
            kept = [None if at is None else _shown(row.values[at]) for at in kept_at]
            batch.add(row.number, text, kept)
            if batch.is_full:
                yield batch.take(rejects)
    except DamagedStreamError as error:
        yield batch.take(rejects)
        number = file.next_row if file is not None else 0
        rejects.malformed(
            error.reason,
            f"the file is damaged: {error}",
            path=piece.path,
            row=number,
            byte=stream.consumed - error.unread,
            place=lambda: f"in or after row {number}",
        )
    yield batch.take(rejects)


def _is_wanted(where: Where, row: CsvRow, places: dict[str, int], piece: Piece, rejects: Rejects) -> bool:
    """Whether --where keeps a row; an empty field is null, one that is no number where it must be is malformed."""
    try:
        wanted = keeps_row(where, lambda name: typed_value(_shown(row.values[places[name]]), where.kinds[name]))
    except WhereTypeError as error:
        _malformed("where_type", f"--where cannot judge a row: {error}", row, piece, rejects)
        return False
    rejects.count("where", 0 if wanted else 1)
    return wanted


def _decoded(value: str, rejects: Rejects) -> str | None:
    """Return a field as valid text, None where its bytes are no UTF-8."""
    return value if _is_valid(value) else decode_utf8(value.encode("utf-8", "surrogateescape"), rejects)


def _shown(value: str) -> str:
    return value if _is_valid(value) else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_valid(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _malformed(reason: str, what: str, row: CsvRow, piece: Piece, rejects: Rejects) -> None:
    rejects.malformed(
        reason,
        what,
        path=piece.path,
        row=row.number,
        byte=row.offset,
        place=lambda: f"row {row.number} (line {row.line})",
        sample=row.beginning.rstrip(b"\r\n"),
    )
