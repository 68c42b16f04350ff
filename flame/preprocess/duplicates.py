"""Documents that are the same token for token, counted over any number of them in bounded memory."""

from __future__ import annotations

import contextlib
import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from flame.files import named_disk_errors

BUCKET_BYTES = 1 << 26
MOST_BUCKETS = 256  # each is an open file
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8"), ("num_tokens", "<u8")])


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Documents that are copies of an earlier one, their tokens, and the texts with most copies, most first."""

    num_documents: int
    num_tokens: int
    most_copied: tuple[Copied, ...]


@dataclass(frozen=True, kw_only=True, order=True)
class Copied:
    """A document and how often it is there, itself counted; `document` is the first."""

    count: int
    num_tokens: int
    document: int


def records_of(tokens: NDArray[np.uint32], ends: NDArray[np.int64], first_document: int) -> NDArray[np.void]:
    """Return a record a document: 128 bits of its ids' hash, its number (from `first_document`), its tokens."""
    view = tokens.data.cast("B")
    stops = (ends * tokens.itemsize).tolist()
    digests = [xxhash.xxh3_128_digest(view[start:stop]) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    records = np.empty(len(ends), RECORD)
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    records["high"], records["low"] = words[:, 0], words[:, 1]
    records["document"] = first_document + np.arange(len(ends))
    records["num_tokens"] = np.diff(ends, prepend=0)
    return records


class CopyCounter:
    """Takes records, laid by their hash into files of `folder`, and counts copies one file at a time.

    Memory: some times `BUCKET_BYTES` up to 500 million documents, and a 256th of all records beyond. Disk: 32 bytes a
    document. Equal hashes count as equal documents: of 10^9 documents, two others collide once in 10^20 corpora.
    """

    def __init__(self, folder: Path, num_documents: int) -> None:
        self._folder = folder
        number = 1
        while number < MOST_BUCKETS and num_documents * RECORD.itemsize > number * BUCKET_BYTES:
            number *= 2
        self._paths = [folder / f"hashes-{bucket:03d}" for bucket in range(number)]
        self._open = contextlib.ExitStack()
        self._files: list[BinaryIO] = [
            self._open.enter_context(open(path, "wb"))  # noqa: SIM115 (`close` does)
            for path in self._paths
        ]

    def add(self, records: NDArray[np.void]) -> None:
        """Take the records of some documents."""
        buckets = records["high"] % np.uint64(len(self._files))
        order = np.argsort(buckets, kind="stable")
        parts = np.split(records[order], np.searchsorted(buckets[order], np.arange(1, len(self._files))))
        with named_disk_errors(self._folder, records.nbytes):
            for file, part in zip(self._files, parts, strict=True):
                file.write(part.tobytes())

    def close(self) -> None:
        """Close the files, what was written being on its way to the disk."""
        with named_disk_errors(self._folder):
            self._open.close()

    def finish(self, most_copied: int) -> Copies:
        """Return what the records say; the files are gone after it."""
        num_documents = num_tokens = 0
        top: list[Copied] = []
        self.close()
        for path in self._paths:
            records = np.fromfile(path, RECORD)
            path.unlink()
            for found in _copied(records):
                num_documents += found.count - 1
                num_tokens += (found.count - 1) * found.num_tokens
                heapq.heappush(top, found)
                if len(top) > most_copied:
                    heapq.heappop(top)
        ordered = sorted(top, key=lambda found: (-found.count, -found.num_tokens, found.document))
        return Copies(num_documents=num_documents, num_tokens=num_tokens, most_copied=tuple(ordered))


def _copied(records: NDArray[np.void]) -> list[Copied]:
    """Return the documents of a bucket that are there more than once."""
    records = records[np.lexsort((records["document"], records["low"], records["high"]))]
    is_new = np.ones(len(records), bool)
    is_new[1:] = (records["high"][1:] != records["high"][:-1]) | (records["low"][1:] != records["low"][:-1])
    starts = np.flatnonzero(is_new)
    counts = np.diff(starts, append=len(records))
    several = counts > 1
    firsts = records[starts[several]]
    return [
        Copied(count=count, num_tokens=num_tokens, document=document)
        for count, num_tokens, document in zip(
            counts[several].tolist(), firsts["num_tokens"].tolist(), firsts["document"].tolist(), strict=True
        )
    ]
