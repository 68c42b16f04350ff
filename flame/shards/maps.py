"""Memory maps of shards: opened at first use, checked as they open, the least recently used closed beyond a limit."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import CorpusError
from flame.shards.format import (
    END_DTYPE,
    HEADER_BYTES,
    RESTORE,
    TOKEN_DTYPE,
    ends_path,
    npy_header,
    read_npy_length,
    tokens_path,
    unreadable_file,
    wrong_size,
)
from flame.shards.manifest import ShardInfo

MAX_MAPPED_SHARDS = 64  # in a process: CPython's mmap keeps a descriptor each, and a shard is two maps
_ENDS_READ_AHEAD = 1 << 20  # 8 MB: four shards' of the default size


@dataclass(frozen=True, eq=False)
class ShardFiles:
    """Where a shard lies and what its files must hold; each instance is its own key in `ShardMaps`."""

    corpus: Path
    split: str
    info: ShardInfo

    @property
    def tokens_path(self) -> Path:
        return tokens_path(self.corpus, self.split, self.info.name)

    @property
    def ends_path(self) -> Path:
        return ends_path(self.corpus, self.split, self.info.name)


@dataclass(frozen=True, slots=True)
class MappedShard:
    """A shard's tokens and document ends, mapped read-only; unmapped when the last array that uses them is dropped.

    `end_values` are the ends again, for `bisect`, which beats numpy at looking one number up.
    """

    tokens: NDArray[np.uint32]
    ends: NDArray[np.uint64]
    end_values: Sequence[int]

    def advise(self, first: int, length: int) -> None:
        """Have the system read tokens `[first, first + length)` from the disk, without waiting for it."""
        advise(self.tokens, first, length)


def advise(values: NDArray[np.unsignedinteger], first: int, length: int) -> None:
    """Tell the system that some of a map's values will be needed. Cost: some µs where they are in the cache."""
    will_need = getattr(mmap, "MADV_WILLNEED", None)  # not every system has it
    if will_need is None:
        return
    base: Any = values.base
    begin = HEADER_BYTES + first * values.itemsize
    before = begin % mmap.PAGESIZE
    base.obj.madvise(will_need, begin - before, before + length * values.itemsize)


def map_shard(files: ShardFiles) -> MappedShard:
    """Map a shard; `CorpusError` unless sizes, headers, and the first and last document end are what they must be.

    A shard that was damaged before this is an error with a name, never a SIGBUS. Cost: two opens, two pages read.
    """
    info = files.info
    tokens = map_values(files.tokens_path, TOKEN_DTYPE, info.num_tokens, "tokens")
    ends = map_values(files.ends_path, END_DTYPE, info.num_documents, "document ends")
    first, last = int(ends[0]), int(ends[-1])
    if first == 0 or last != info.num_tokens:
        raise CorpusError(
            "a shard's document ends do not belong to its tokens",
            where=files.ends_path,
            got=f"a first end of {first} and a last of {last}",
            expected=f"a first end above 0 and a last of {info.num_tokens}, the shard's number of tokens",
            fix=RESTORE,
        )
    advise(ends, 0, min(len(ends), _ENDS_READ_AHEAD))  # searched all over, under the lock of Python
    return MappedShard(tokens=tokens, ends=ends, end_values=ends.data)


def check_sizes(files: ShardFiles) -> None:
    """Raise `CorpusError` unless both files are there and as long as they must be. Cost: two stats."""
    for path, dtype, length in (
        (files.tokens_path, TOKEN_DTYPE, files.info.num_tokens),
        (files.ends_path, END_DTYPE, files.info.num_documents),
    ):
        expected_bytes = HEADER_BYTES + length * dtype.itemsize
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise unreadable_file(path, error) from error
        if size_bytes != expected_bytes:
            raise wrong_size(path, size_bytes, expected_bytes)


def map_values(path: Path, dtype: np.dtype[np.unsignedinteger], length: int, what: str) -> NDArray[np.unsignedinteger]:
    """Map the values of a `.npy` file of ours; `CorpusError` unless it holds `length` of them. `what` names them."""
    size_bytes = HEADER_BYTES + length * dtype.itemsize
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = os.pread(descriptor, HEADER_BYTES, 0)
            if header != npy_header(dtype, length) or os.fstat(descriptor).st_size != size_bytes:
                raise _not_as_in_manifest(path, dtype, length, what)
            buffer = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable_file(path, error) from error
    # a plain array: slicing np.memmap costs five times as much, on every read
    return np.frombuffer(buffer, dtype, length, HEADER_BYTES)


def _not_as_in_manifest(path: Path, dtype: np.dtype[np.unsignedinteger], length: int, what: str) -> CorpusError:
    try:
        found = read_npy_length(path, dtype)
    except CorpusError as error:
        return error
    return CorpusError(
        "a shard's file is whole, but not the one that the manifest names",
        where=path,
        got=f"{found} {what}",
        expected=f"{length} {what}",
        fix=RESTORE,
    )


class ShardMaps:
    """The shards that are mapped now, at most `limit` of them. Safe to use from several threads."""

    def __init__(self, limit: int = MAX_MAPPED_SHARDS) -> None:
        self._limit = limit
        self._mapped: OrderedDict[ShardFiles, MappedShard] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, files: ShardFiles) -> MappedShard:
        """Return a shard, mapping it if it is not (see `map_shard` for the errors)."""
        with self._lock:
            shard = self._mapped.get(files)
            if shard is not None:
                self._mapped.move_to_end(files)
                return shard
        shard = map_shard(files)  # outside the lock: a slow disk holds up no other reader
        with self._lock:
            self._mapped[files] = shard
            if len(self._mapped) > self._limit:
                self._mapped.popitem(last=False)
        return shard

    def __len__(self) -> int:
        return len(self._mapped)


MAPS = ShardMaps()
"""All splits of a process share one limit: mixtures have hundreds of corpora, and descriptors are a process's own."""
