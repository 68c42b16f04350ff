"""Exact copies among any number of documents, told by the 128-bit hash of their text, in bounded memory.

Each task of a first reading writes records of its documents as sorted runs in which each text comes once. The runs are
then read side by side, one slice of all hashes at a time: of a text that several hold, the one that comes first in the
order of the input stays, and the places of the others are written task by task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flame.files import (
    fsync_file,
    fsync_folder,
    named_disk_errors,
    publish,
    remove_tree,
    temporary_path,
    write_bytes,
)
from flame.preprocess.holdout import text_hashes
from flame.preprocess.records import checksum_of, damaged, intact, read_record, write_record
from flame.preprocess.texts import Documents

# `place` is the document's number in its task, the texts that were refused before not counted.
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u8"), ("place", "<u8"), ("file", "<u4")])
RUN_RECORDS = 2**20
SLICE_RECORDS = 2**19
MOST_READS = 2**10  # of a run: of tens of thousands each is a read of a shared disk
SLICES = 2**12  # by the hash's first bits: as fine as what is read at a time can be
WAITING_PLACES = 2**20
_NAME = "task-{:05d}"


def records_of(documents: Documents, *, file: int, first_place: int) -> NDArray[np.void]:
    """Return the record of each document; `file` is the file's number in the order of the input."""
    records = np.empty(len(documents), RECORD)
    words = np.frombuffer(text_hashes(documents.texts).buffers()[1] or b"", "<u8").reshape(-1, 2)[: len(documents)]
    records["high"], records["low"] = words[:, 0], words[:, 1]
    records["row"], records["file"] = documents.rows, file
    records["place"] = first_place + np.arange(len(documents))
    return records


def first_and_copies(records: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the records to keep, in order of their hashes, and of those whose text came before."""
    order = np.argsort(records["high"], kind="stable")  # runs that are sorted already cost little
    high = records["high"][order]
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = high[1:] == high[:-1]
    tied[:-1] |= tied[1:]
    if not tied.any():
        return order, order[:0]
    some = order[tied]
    found = records[some]
    again = np.lexsort((found["row"], found["file"], found["low"], found["high"]))
    order[tied], found = some[again], found[again]
    copy = np.zeros(len(found), dtype=bool)
    copy[1:] = (found["high"][1:] == found["high"][:-1]) & (found["low"][1:] == found["low"][:-1])
    is_copy = np.zeros(len(order), dtype=bool)
    is_copy[tied] = copy
    return order[~is_copy], order[is_copy]


class RunWriter:
    """Writes the records of a task: sorted runs, and the places of copies within a run, which are known at once.

    Nothing is left under a final name without the receipt, which comes last. Memory: some times `RUN_RECORDS`.
    """

    def __init__(self, folder: Path, task: int, plan_digest: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _NAME.format(task)
        self._receipt = {"task": task, "plan": plan_digest}
        self._waiting: list[NDArray[np.void]] = []
        self._num_waiting = 0
        self._runs: list[NDArray[np.int64]] = []
        self._copies: list[NDArray[np.uint64]] = []
        self._checksums: list[str] = []
        self._file = open(temporary_path(_records(self._path)), "wb")  # noqa: SIM115 (`finish` and `abort` do)

    def add(self, records: NDArray[np.void]) -> None:
        self._waiting.append(records)
        self._num_waiting += len(records)
        if self._num_waiting >= RUN_RECORDS:
            self._flush()

    def _flush(self) -> None:
        records = np.concatenate(self._waiting)
        self._waiting, self._num_waiting = [], 0
        first, copies = first_and_copies(records)
        self._copies.append(records["place"][copies])
        run = records[first]
        with named_disk_errors(self._path, run.nbytes):
            self._file.write(data := run.tobytes())
        self._checksums.append(checksum_of(data))
        self._runs.append(np.searchsorted(_slice_of(run), np.arange(SLICES + 1)))

    def finish(self) -> None:
        if self._num_waiting:
            self._flush()
        with named_disk_errors(self._path, RECORD.itemsize * sum(int(run[-1]) for run in self._runs)):
            self._file.close()
            fsync_file(Path(self._file.name))
            publish(Path(self._file.name), _records(self._path))
        write_sealed(_runs(self._path), np.array(self._runs, "<u4").tobytes())
        write_sealed(_copies(self._path), np.concatenate([*self._copies, np.zeros(0, "<u8")]).astype("<u8").tobytes())
        write_record(_receipt(self._path), self._receipt | {"runs": self._checksums})

    def abort(self) -> None:
        self._file.close()
        remove_tree(Path(self._file.name))


def _slice_of(records: NDArray[np.void]) -> NDArray[np.int64]:
    return (records["high"] >> np.uint64(64 - (SLICES - 1).bit_length())).astype(np.int64)


def _records(path: Path) -> Path:
    return path.with_suffix(".records")


def _runs(path: Path) -> Path:
    return path.with_suffix(".runs")


def _copies(path: Path) -> Path:
    return path.with_suffix(".copies")


def _receipt(path: Path) -> Path:
    return path.with_suffix(".json")


def write_sealed(path: Path, data: bytes) -> None:
    """Write a small file that ends with the checksum of the rest."""
    write_bytes(path, data + xxhash.xxh3_128_digest(data))


def read_sealed(path: Path, dtype: str, *, fix: str) -> NDArray[Any]:
    """Return the numbers that `write_sealed` wrote; `CorpusError` where they are others, or none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise damaged(path, got="no such file", fix=fix) from error
    if xxhash.xxh3_128_digest(data[:-16]) != data[-16:]:
        raise damaged(path, got="its content was changed after it was written", fix=fix)
    return np.frombuffer(data[:-16], dtype)


def _hash_again(path: Path) -> str:
    return f"Delete {_receipt(path)} and run the same command again: its task is hashed again"


def read_done(folder: Path, plan_digest: str) -> set[int]:
    """Return the tasks of this plan whose records are complete; `CorpusError` where it cannot be told."""
    receipts = [_read_receipt(path) for path in folder.glob("task-*.json")]
    return {receipt["task"] for receipt in receipts if receipt["plan"] == plan_digest}


def is_done(folder: Path, task: int, plan_digest: str) -> bool:
    """Whether the records of a task of this plan are complete."""
    path = _receipt(folder / _NAME.format(task))
    return path.exists() and _read_receipt(path)["plan"] == plan_digest


def _read_receipt(path: Path) -> dict[str, Any]:
    with intact(path, fix="Delete this file and run the same command again: its task is hashed again"):
        receipt = read_record(path)
        if path.stem != _NAME.format(receipt["task"]):
            raise ValueError(f"it is the receipt of task {receipt['task']}")
        return receipt


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A sorted run in a task's file: where it begins, in records, and where each slice does within it."""

    task: int
    path: Path
    start: int
    slices: NDArray[np.uint32]
    checksum: str
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def read(self, first: int, last: int) -> NDArray[np.void]:
        """Return the records of some slices; all are to be read, in order, so that damage is seen at the last."""
        start, stop = int(self.slices[first]), int(self.slices[last])
        try:
            found = np.fromfile(self.path, RECORD, count=stop - start, offset=(self.start + start) * RECORD.itemsize)
        except OSError:  # it ends before
            found = np.zeros(0, RECORD)
        self.digest.update(found.tobytes())
        if len(found) < stop - start or (last == SLICES and f"xxh3:{self.digest.hexdigest()}" != self.checksum):
            path = self.path.with_suffix("")
            raise damaged(self.path, got="its content was changed after it was written", fix=_hash_again(path))
        return found


def merge(folder: Path, tasks: Sequence[int], target: Path) -> int:
    """Write into `target`, whole or not at all, the places of all copies, a file a task; returns their number.

    Memory: some times `SLICE_RECORDS`, or a part in `MOST_READS` of all records (from 5·10^8 on; 2 GB of 15·10^9), and
    16 KB a run.
    """
    temporary = temporary_path(target)
    remove_tree(temporary)
    temporary.mkdir(parents=True)
    number = 0
    waiting: list[tuple[NDArray[np.int32], NDArray[np.uint64]]] = []
    for task in tasks:
        path = folder / _NAME.format(task)
        found = read_sealed(_copies(path), "<u8", fix=_hash_again(path))
        number += len(found)
        _append(temporary, [(np.full(len(found), task, np.int32), found)])
    for task_numbers, records in _slices(_find_runs(folder, tasks)):
        _, copies = first_and_copies(records)
        waiting.append((task_numbers[copies], records["place"][copies]))
        number += len(copies)
        if sum(len(places) for _, places in waiting) >= WAITING_PLACES:
            _append(temporary, waiting)
            waiting = []
    _append(temporary, waiting)
    for task in tasks:
        _seal_places(temporary / _NAME.format(task))
    with named_disk_errors(target, 8 * number + 16 * len(tasks)):
        fsync_folder(temporary)
        publish(temporary, target)
    return number


def _find_runs(folder: Path, tasks: Sequence[int]) -> list[_Run]:
    runs = []
    for task in tasks:
        path = folder / _NAME.format(task)
        start = 0
        slices_of_runs = read_sealed(_runs(path), "<u4", fix=_hash_again(path)).reshape(-1, SLICES + 1)
        for slices, checksum in zip(slices_of_runs, _read_receipt(_receipt(path))["runs"], strict=True):
            runs.append(_Run(task=task, path=_records(path), start=start, slices=slices, checksum=checksum))
            start += int(slices[-1])
    return runs


def _slices(runs: Sequence[_Run]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.void]]]:
    """Yield the task and the record of all documents, every text's together, as many at a time as `merge` says."""
    if not runs:
        return
    ends = np.cumsum(sum(np.diff(run.slices.astype(np.int64)) for run in runs))
    at_once = max(SLICE_RECORDS, int(ends[-1]) // MOST_READS)
    first = 0
    while first < SLICES:
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + at_once, side="right")), first + 1)
        parts = [run.read(first, last) for run in runs]
        numbers = np.repeat(np.array([run.task for run in runs], np.int32), [len(part) for part in parts])
        yield numbers, np.concatenate(parts)
        first = last


def _append(folder: Path, found: Sequence[tuple[NDArray[np.int32], NDArray[np.uint64]]]) -> None:
    if not found:
        return
    tasks = np.concatenate([numbers for numbers, _ in found])
    order = np.argsort(tasks, kind="stable")
    tasks, places = tasks[order], np.concatenate([places for _, places in found])[order]
    starts = np.flatnonzero(np.diff(tasks, prepend=-1))
    with named_disk_errors(folder, places.nbytes):
        for start, part in zip(starts.tolist(), np.split(places, starts[1:]), strict=False):
            with open(folder / _NAME.format(int(tasks[start])), "ab") as file:
                file.write(part.astype("<u8").tobytes())


def _seal_places(path: Path) -> None:
    """End a task's file of places with its checksum; a task without copies gets one too, so that none is missed."""
    with named_disk_errors(path, 16):
        with open(path, "a+b") as file:
            file.seek(0)
            file.write(xxhash.xxh3_128_digest(file.read()))
        fsync_file(path)


@dataclass
class Copies:
    """The documents of a task that are copies, asked for batch by batch in the order of the task."""

    places: NDArray[np.uint64]
    next_place: int = 0

    @staticmethod
    def of_task(folder: Path, task: int) -> Copies:
        """Read what `merge` wrote. Memory: 8 bytes a copy of the task."""
        fix = f"Delete {folder} and run the same command again: copies are looked for again"
        return Copies(np.sort(read_sealed(folder / _NAME.format(task), "<u8", fix=fix)))

    def keep(self, count: int) -> NDArray[np.bool_]:
        """Return which of the next `count` documents are no copies."""
        first, last = np.searchsorted(self.places, [self.next_place, self.next_place + count])
        keep = np.ones(count, dtype=bool)
        keep[self.places[first:last].astype(np.int64) - self.next_place] = False
        self.next_place += count
        return keep
