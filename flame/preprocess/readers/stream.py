"""Lines of a text file with their byte offsets, plain or compressed, in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from flame.preprocess.storage import open_file

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 2**20
# Small, because a compressed chunk may hold a thousand times its size.
COMPRESSED_CHUNK_BYTES = 2**15
BOM = b"\xef\xbb\xbf"
MAX_WINDOW_BYTES = 2**31


class DamagedStreamError(Exception):
    """A compressed file ends too early (`reason` "truncated") or does not decompress ("corrupt").

    Of what was read, `unread` bytes at the end lie behind the damage, as far as that is known.
    """

    def __init__(self, reason: str, detail: str, *, unread: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.unread = unread


class ByteStream:
    """The decompressed bytes of a file from `start` on.

    `consumed` is how far the file itself was read, `produced` the end of what was given, as a place in the text.
    """

    def __init__(self, path: str, compression: str | None, start: int = 0) -> None:
        assert compression is None or start == 0, "a compressed file is read from its beginning"
        self.path = path
        self.compression = compression
        self.start = start
        self.consumed = start
        self.produced = start

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes; raises `DamagedStreamError` after all that could be read."""
        with open_file(self.path) as file:
            file.seek(self.start)
            raw = self._raw(file)
            for chunk in raw if self.compression is None else _DECOMPRESSED[self.compression](raw):
                self.produced += len(chunk)
                yield chunk

    def _raw(self, file: BinaryIO) -> Iterator[bytes]:
        size = CHUNK_BYTES if self.compression is None else COMPRESSED_CHUNK_BYTES
        while chunk := file.read(size):
            self.consumed += len(chunk)
            yield chunk


def _gunzip(raw: Iterator[bytes]) -> Iterator[bytes]:
    member = zlib.decompressobj(wbits=31)
    begun = False
    for data in raw:
        if not begun and not GZIP_MAGIC.startswith(data[:2]):
            raise DamagedStreamError("corrupt", "it holds no gzip data, whatever its name says", unread=len(data))
        begun = True
        while data:
            if member.eof:
                data = data.lstrip(b"\0")  # zero bytes after a member are padding, as gzip itself has it
                if not data:
                    break
                if not GZIP_MAGIC.startswith(data[:2]):
                    what = "other bytes follow the end of its gzip data"
                    raise DamagedStreamError("corrupt", what, unread=len(data))
                member = zlib.decompressobj(wbits=31)
            yield from _inflate(member, data)
            data = member.unused_data
    if not (begun and member.eof):
        raise DamagedStreamError("truncated", "the gzip stream ends before its end mark")


def _inflate(member: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """Yield what `data` holds in pieces of bounded size, up to the end of the member."""
    while True:
        try:
            text = member.decompress(data, CHUNK_BYTES)
        except zlib.error as error:
            raise DamagedStreamError("corrupt", str(error).partition(": ")[2] or str(error)) from error
        if text:
            yield text
        data = member.unconsumed_tail
        if member.eof or (not data and len(text) < CHUNK_BYTES):
            return


def _unzstd(raw: Iterator[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    begun = False
    for chunk in raw:
        data = chunk
        while data:
            if frame.eof:
                frame = decompressor.decompressobj()
            try:
                text = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise DamagedStreamError("corrupt", _zstd_words(error, begun), unread=len(data)) from error
            begun = True
            if text:
                yield text
            data = frame.unused_data if frame.eof else b""
    if not (begun and frame.eof):
        raise DamagedStreamError("truncated", "the zstd stream ends before its last frame does")


def _zstd_words(error: zstandard.ZstdError, begun: bool) -> str:
    if "Unknown frame descriptor" not in str(error):
        return str(error).removeprefix("zstd decompress error: ")
    return "other bytes follow one of its zstd frames" if begun else "it holds no zstd data, whatever its name says"


_DECOMPRESSED = {"gzip": _gunzip, "zstd": _unzstd}


def lines_between(stream: ByteStream, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line without its end) of every line that *begins* in [start, stop); None is the file's end.

    `stream` comes from `range_stream` with the same start. Lines end at LF; a CR before it is dropped, and so is a byte
    order mark before the first. A range that starts inside a line leaves that line to the range before it. On a
    damaged stream the unfinished line is not given.
    """
    begin = position = stream.start  # where the line at hand begins, and what was read so far
    pending: list[bytes] = []
    for chunk in stream.chunks():
        first, *rest = chunk.split(b"\n")
        if begin >= start:
            pending.append(first)
        if rest:
            if begin >= start:
                yield begin, _without_ends(b"".join(pending), begin)
            begin = position + len(first) + 1
            for line in rest[:-1]:
                if stop is not None and begin >= stop:
                    return
                yield begin, _without_ends(line, begin)
                begin += len(line) + 1
            pending = [rest[-1]]
        position += len(chunk)
        if stop is not None and (begin if begin >= start else position) >= stop:
            return  # also in the middle of a line of the range before, however long it is
    last = b"".join(pending)
    if last and begin >= start:
        yield begin, _without_ends(last, begin)


def raw_lines(stream: ByteStream) -> Iterator[bytes]:
    """Yield every line with its end; on a damaged stream the unfinished line is not given."""
    pending: list[bytes] = []
    for chunk in stream.chunks():
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            pending.append(line)
            yield b"".join(pending) + b"\n"
            pending = []
        pending.append(rest)
    last = b"".join(pending)
    if last:
        yield last


def range_stream(path: str, compression: str | None, start: int) -> ByteStream:
    """Return the stream for the lines that begin at or after `start`: one byte earlier, to see whether a line does."""
    return ByteStream(path, compression, max(start - 1, 0))


def line_number(path: str, compression: str | None, offset: int) -> int:
    """Return the 1-based number of the line that begins at `offset`: one more reading, to word an error."""
    newlines = 0
    left = offset
    try:
        for chunk in ByteStream(path, compression).chunks():
            newlines += chunk.count(b"\n", 0, left)
            left -= len(chunk)
            if left <= 0:
                break
    except DamagedStreamError:
        pass
    return newlines + 1


def _without_ends(line: bytes, offset: int) -> bytes:
    if offset == 0 and line.startswith(BOM):
        line = line[len(BOM) :]
    return line[:-1] if line.endswith(b"\r") else line
