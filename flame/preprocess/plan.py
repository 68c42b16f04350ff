"""The deterministic work list: which stretch of which file belongs to which task. Pure: no disk, no clock.

Pieces are stretches of one file, about `piece_bytes` of text each; tasks are lists of pieces worth about
`target_bytes`. Both depend on the inputs and the options only, never on the number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PLAN_VERSION = 1  # part of every plan's digest: raise it when the same inputs and options are cut differently
MIN_TASK_BYTES = 2**20
MAX_PIECE_BYTES = 2**25
TASKS_WANTED = 64
COMPRESSION_RATIO = 3
LINE_FORMATS = ("jsonl", "txt")  # read by byte ranges
WHOLE_FORMATS = ("csv", "tsv")  # no place within is known to begin a row
STREAM_FORMATS = LINE_FORMATS + WHOLE_FORMATS  # the others are read by groups of rows: row groups, record batches


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file as it was when the build was planned.

    `groups` are the (rows, bytes of text) of the file's groups of rows, empty for text. `stop` ends the part that is
    read: a row, or a byte offset in the decompressed stream; None reads all. A `damaged` file cannot be described:
    reading it says so, or counts it, as the user chose. `etag` is how a remote store tells versions of a file apart.
    """

    path: str
    format: str
    compression: str | None
    size_bytes: int
    mtime_ns: int
    groups: tuple[tuple[int, int], ...] = ()
    stop: int | None = None
    damaged: bool = False
    etag: str | None = None

    @property
    def num_rows(self) -> int | None:
        """The rows that are read; None where they are not counted."""
        if self.format in STREAM_FORMATS:
            return None
        rows = sum(rows for rows, _ in self.groups)
        return rows if self.stop is None else min(rows, self.stop)

    @property
    def text_bytes(self) -> int:
        """About the bytes of text that are read."""
        if self.format not in STREAM_FORMATS:
            return sum(size for _, size in self.groups)
        if self.stop is not None:
            return self.stop
        return self.size_bytes * (1 if self.compression is None else COMPRESSION_RATIO)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A readable stretch of one file.

    [start, stop) are groups of rows, or the bytes in which a line begins (stop None: to the end); `first_row` is the
    first row of the stretch, `row_limit` the row to stop before, both of grouped rows only.
    """

    path: str
    format: str
    compression: str | None
    size_bytes: int
    mtime_ns: int
    start: int
    stop: int | None
    num_bytes: int
    first_row: int = 0
    row_limit: int | None = None
    etag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one worker does at a time: its pieces in order, its own shards, one receipt."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def plan_tasks(files: Sequence[InputFile], *, shard_tokens: int, shuffle_seed: int | None) -> tuple[Task, ...]:
    """Return the tasks over `files`; `shuffle_seed` None keeps the input's order."""
    target = target_bytes(sum(file.text_bytes for file in files), shard_tokens)
    pieces = [piece for file in files for piece in cut_file(file, min(MAX_PIECE_BYTES, target))]
    if shuffle_seed is not None:
        order = random_order(f"pieces|{shuffle_seed}", len(pieces))
        pieces = [pieces[index] for index in order.tolist()]
    tasks: list[Task] = []
    waiting: list[Piece] = []
    waiting_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        waiting_bytes += piece.num_bytes
        if waiting_bytes >= target:
            tasks.append(Task(index=len(tasks), pieces=tuple(waiting)))
            waiting, waiting_bytes = [], 0
    if waiting:
        tasks.append(Task(index=len(tasks), pieces=tuple(waiting)))
    return tuple(tasks)


def target_bytes(total_bytes: int, shard_tokens: int) -> int:
    """Return the bytes of text worth a task: 1/64 of the input, at least 1 MiB, at most 4 bytes a token of a shard."""
    return min(max(total_bytes // TASKS_WANTED, MIN_TASK_BYTES), 4 * shard_tokens)


def cut_file(file: InputFile, piece_bytes: int) -> list[Piece]:
    """Return the file's pieces in order: row groups together, byte ranges, or a whole csv or compressed file."""
    if file.damaged:
        return [_piece(file, 0, 0, 0)]
    if file.format not in STREAM_FORMATS:
        return _cut_groups(file, piece_bytes)
    if file.compression is not None or file.format in WHOLE_FORMATS:
        return [_piece(file, 0, file.stop, file.text_bytes)]
    end = file.text_bytes
    starts = range(0, end, piece_bytes)
    return [_piece(file, start, min(start + piece_bytes, end), min(piece_bytes, end - start)) for start in starts]


def _cut_groups(file: InputFile, piece_bytes: int) -> list[Piece]:
    pieces: list[Piece] = []
    start = first_row = row = size = 0
    for group, (rows, group_bytes) in enumerate(file.groups):
        row += rows
        size += group_bytes
        if size >= piece_bytes or group == len(file.groups) - 1:
            if row > first_row:
                pieces.append(_piece(file, start, group + 1, size, first_row=first_row, row_limit=file.stop))
            start, first_row, size = group + 1, row, 0
    return pieces


def _piece(
    file: InputFile, start: int, stop: int | None, num_bytes: int, *, first_row: int = 0, row_limit: int | None = None
) -> Piece:
    return Piece(
        path=file.path,
        format=file.format,
        compression=file.compression,
        size_bytes=file.size_bytes,
        mtime_ns=file.mtime_ns,
        start=start,
        stop=stop,
        num_bytes=num_bytes,
        first_row=first_row,
        row_limit=row_limit,
        etag=file.etag,
    )


def random_order(key: str, count: int) -> NDArray[np.int64]:
    """Return a permutation of `count` that `key` alone decides, on any machine and with any version of numpy.

    The order of splitmix64 (Steele, Lea and Flood 2014) values of a counter that starts at the key's blake2b.
    """
    start = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    values = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(values ^ (values >> np.uint64(31)), kind="stable")
