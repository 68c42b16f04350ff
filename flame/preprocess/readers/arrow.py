"""Texts of Arrow IPC files and streams (.arrow, .feather), record batch by record batch.

Both forms hold the same messages, a file between a magic word and a footer: they are read as a stream. Where a batch
lies and how many rows it has stands in its message's header, so that nothing is read or decompressed before its turn.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from flame.errors import InputError
from flame.preprocess.plan import COMPRESSION_RATIO, Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.rows import arrow_words, field_of, is_text_type, opened, read_groups
from flame.preprocess.rejects import MEND_FILE, Rejects
from flame.preprocess.storage import open_file
from flame.preprocess.texts import Documents

FILE_MAGIC = b"ARROW1\0\0"
FEATHER_V1_MAGIC = b"FEA1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
MAX_HEADER_BYTES = 2**28
HEAD_BYTES = 4096  # read at once, as most headers are shorter
_DICTIONARY, _BATCH = 2, 3  # MessageHeader in the format's Message.fbs


@dataclass(frozen=True, kw_only=True)
class Message:
    """Where a record batch or a dictionary lies; `num_rows` is None for a dictionary."""

    start: int
    stop: int
    num_rows: int | None
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class ArrowLayout:
    """The messages of a file in its order, and the schema with the bytes [start, stop) that hold it."""

    schema: pa.Schema
    schema_bytes: tuple[int, int]
    messages: tuple[Message, ...]

    @property
    def batches(self) -> list[Message]:
        return [message for message in self.messages if message.num_rows is not None]

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The (rows, about the bytes of all columns) of each record batch."""
        return tuple((batch.num_rows or 0, batch.size_bytes) for batch in self.batches)

    def needed(self, group: int) -> list[tuple[int, int]]:
        """Return the stretches that, one after the other, are a stream of only this batch."""
        batch = self.batches[group]
        before = (message for message in self.messages if message.num_rows is None and message.start < batch.start)
        return [self.schema_bytes, *((message.start, message.stop) for message in before), (batch.start, batch.stop)]


def read_layout(path: str) -> ArrowLayout:
    """Return the layout of an Arrow file or stream; `InputError` where it is none or is cut short.

    Cost: the headers of all messages are read, and no body.
    """
    with open_file(path, read_ahead=False) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        magic = file.read(len(FILE_MAGIC))
        if magic.startswith(FEATHER_V1_MAGIC):
            raise InputError(
                "the file is of Feather's first version, which is not read",
                where=path,
                fix="pyarrow.feather.write_feather(pyarrow.feather.read_table(old), new) writes it as the second",
            )
        try:
            return _read_messages(file, len(FILE_MAGIC) if magic == FILE_MAGIC else 0, size)
        except (pa.ArrowException, struct.error, ValueError) as error:
            raise InputError(
                f"a file is no readable Arrow file: {arrow_words(error)}", where=path, fix=MEND_FILE
            ) from error


def _read_messages(file: BinaryIO, start: int, size: int) -> ArrowLayout:
    header, schema_stop = _read_header(file, start, size)
    if header is None:
        raise ValueError("it holds no schema")
    file.seek(start)
    schema = pa.ipc.read_schema(pa.py_buffer(file.read(schema_stop - start)))
    messages: list[Message] = []
    place = schema_stop
    while True:
        header, body = _read_header(file, place, size)
        if header is None:
            return ArrowLayout(schema=schema, schema_bytes=(start, schema_stop), messages=tuple(messages))
        kind, body_bytes, num_rows, compressed = _parse_header(header)
        stop = body + body_bytes
        if not place < stop <= size:
            raise ValueError(f"it is cut short: a message of {stop - place} bytes begins at byte {place} of {size}")
        if kind in (_DICTIONARY, _BATCH):
            text_bytes = body_bytes * (COMPRESSION_RATIO if compressed else 1)
            rows = num_rows if kind == _BATCH else None
            messages.append(Message(start=place, stop=stop, num_rows=rows, size_bytes=text_bytes))
        place = stop


def _read_header(file: BinaryIO, place: int, size: int) -> tuple[bytes | None, int]:
    """Return the header of the message at `place`, None at the end of the stream, and where it ends."""
    file.seek(place)
    head = file.read(HEAD_BYTES)
    prefix = head[:8]
    if prefix == END_OF_STREAM:
        return None, place + 8
    if len(prefix) < 8:
        raise ValueError("it is cut short: the end of the stream is not marked")
    mark, length = struct.unpack("<II", prefix)
    begin = place + 8
    if mark != 0xFFFFFFFF:  # before Arrow 0.15 the length came first
        begin, length = place + 4, mark
        if length == 0:
            return None, begin
    if length > min(MAX_HEADER_BYTES, size - begin):
        raise ValueError(f"no message begins at byte {place}, or it is cut short")
    if begin + length - place <= len(head):
        return head[begin - place : begin - place + length], begin + length
    file.seek(begin)
    return file.read(length), begin + length


def _parse_header(header: bytes) -> tuple[int, int, int, bool]:
    """Return the kind of a message, the bytes of its body, the rows of a record batch, and whether it is compressed.

    The header is a flatbuffer: see Message.fbs in the specification of the Arrow columnar format.
    """

    def field(table: int, slot: int) -> int | None:
        vtable = table - struct.unpack_from("<i", header, table)[0]
        (vtable_bytes,) = struct.unpack_from("<H", header, vtable)
        if 4 + 2 * slot >= vtable_bytes:
            return None
        (offset,) = struct.unpack_from("<H", header, vtable + 4 + 2 * slot)
        return table + offset if offset else None

    def number(place: int | None, kind: str) -> int:
        return 0 if place is None else int(struct.unpack_from(f"<{kind}", header, place)[0])

    message = number(0, "I")
    kind, place, body_bytes = number(field(message, 1), "B"), field(message, 2), number(field(message, 3), "q")
    if place is None or body_bytes < 0:
        raise ValueError("a message's header makes no sense")
    if kind != _BATCH:
        return kind, body_bytes, 0, False
    batch = place + number(place, "I")
    return kind, body_bytes, number(field(batch, 0), "q"), field(batch, 3) is not None


class _Stretches(io.RawIOBase):
    """Stretches of a file, one after the other, as a stream."""

    def __init__(self, file: BinaryIO, stretches: Sequence[tuple[int, int]]) -> None:
        self._file = file
        self._left = list(stretches)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while self._left:
            start, stop = self._left[0]
            if start < stop:
                taken = min(size, stop - start) if size >= 0 else stop - start
                self._file.seek(start)
                data = self._file.read(taken)
                self._left[0] = (start + len(data), stop)
                return data
            self._left.pop(0)
        return b""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_arrow(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of the piece's record batches. Cost: memory grows with the largest record batch."""
    layout = opened(read_layout, piece.path, rejects)
    if layout is None:
        return
    names = columns.read_from(layout.schema, field_of)

    def batches_of(group: int, rows: int) -> Iterator[pa.RecordBatch]:
        return arrow_batches(piece.path, layout, group, rows, names)

    yield from read_groups(layout.groups, batches_of, piece, columns, rejects)


def arrow_batches(
    path: str, layout: ArrowLayout, group: int, rows: int, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield a record batch, at most `rows` at a time, with only the columns in which `names` lie."""
    schema = layout.schema
    fields = {schema.get_field_index(name if name in schema.names else name.split(".")[0]) for name in names}
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=sorted(fields))
    with open_file(path, read_ahead=False) as file:
        source = io.BufferedReader(_Stretches(file, layout.needed(group)), 2**16)
        batch = pa.ipc.open_stream(pa.PythonFile(source, mode="r"), options=options).read_next_batch()
    _check_offsets(batch)
    yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _check_offsets(batch: pa.RecordBatch) -> None:
    """Raise `pa.ArrowInvalid` where offsets point outside of their data: the format has no checksums."""
    for array in batch.columns:
        if pa.types.is_string(array.type):
            array = array.view(pa.binary())  # whether the bytes are UTF-8 is a question of each text
        elif pa.types.is_large_string(array.type):
            array = array.view(pa.large_binary())
        elif is_text_type(array.type):
            array.validate()
            continue
        array.validate(full=True)
