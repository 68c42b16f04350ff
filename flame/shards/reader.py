"""Reading a corpus: the tokens of a split as one long virtual array, mapped lazily, checked where they are touched."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import CorpusError, UsageError
from flame.shards.format import (
    END_DTYPE,
    HEADER_BYTES,
    REBUILD,
    TOKEN_DTYPE,
    TOKENIZER_FOLDER,
    docs_path,
    ends_path,
    read_npy_length,
    tokens_path,
)
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, read_manifest

MAX_MAPPED_SHARDS = 64
"""CPython's mmap keeps a file descriptor for each map, two maps a shard."""


class Corpus:
    """A sealed corpus. Opening reads manifest.json only; nothing is ever written into it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, path: Path) -> Corpus:
        """Open the corpus in `path`; `UsageError` if the path does not exist, `CorpusError` if it is no corpus."""
        if not path.exists():
            raise UsageError("there is no such corpus folder", got=path, fix="Check the path")
        return cls(path, read_manifest(path))

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def tokenizer_folder(self) -> Path:
        return self.path / TOKENIZER_FOLDER

    def split(self, name: str) -> Split:
        """Return a split by name; `CorpusError` naming those there are."""
        if name not in self.manifest.splits:
            raise CorpusError(
                f"the corpus has no split {name!r}",
                where=self.path,
                expected="one of " + ", ".join(self.manifest.splits),
                fix="A val split is made by flame-preprocess build --val_fraction" if name == "val" else None,
            )
        if name not in self._splits:
            self._splits[name] = Split(self, name, self.manifest.splits[name])
        return self._splits[name]


@dataclass(frozen=True)
class _MappedShard:
    tokens: NDArray[np.uint32]
    ends: NDArray[np.uint64]


class Split:
    """One split of a corpus: tokens numbered from 0 through all its shards. Safe to read from several threads."""

    def __init__(self, corpus: Corpus, name: str, info: SplitInfo) -> None:
        self.corpus = corpus
        self.name = name
        self.num_tokens = info.num_tokens
        self.num_documents = info.num_documents
        self.num_bytes = info.num_bytes
        self.max_token_id = info.max_token_id
        self.shards: tuple[ShardInfo, ...] = info.shards
        self._token_starts = _starts([shard.num_tokens for shard in info.shards])
        self._document_starts = _starts([shard.num_documents for shard in info.shards])
        self._mapped: OrderedDict[int, _MappedShard] = OrderedDict()
        self._lock = threading.Lock()
        self._early_error: CorpusError | None = None
        self._looking = threading.Thread(target=self._look_at_all, name=f"look at {corpus.path}", daemon=True)
        self._looking.start()

    def __repr__(self) -> str:
        return f"Split({str(self.corpus.path)!r}, {self.name!r})"

    # ---- tokens

    def read(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return a copy of the tokens `[start, stop)`."""
        out = np.empty(stop - start, dtype=np.uint32)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` (1-D, contiguous, 4-byte integers) with the tokens from `start` on."""
        assert out.dtype.itemsize == TOKEN_DTYPE.itemsize and out.ndim == 1, "4 bytes a token"
        self._check_range(start, start + len(out))
        values = out.view(TOKEN_DTYPE)
        done = 0
        shard = self._shard_of(start) if len(out) else 0
        while done < len(values):
            offset = start + done - self._token_starts[shard]
            piece = self._shard(shard).tokens[offset : offset + len(values) - done]
            values[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1

    # ---- documents

    def ends_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document ends e (exclusive, in tokens of the split) with `start < e <= stop`, rising."""
        self._check_range(start, stop)
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = self._shard_of(start), self._shard_of(stop - 1)
        if first == last:
            return self._ends_in_shard(first, start, stop)
        return np.concatenate([self._ends_in_shard(shard, start, stop) for shard in range(first, last + 1)])

    def _ends_in_shard(self, shard: int, start: int, stop: int) -> NDArray[np.int64]:
        base = self._token_starts[shard]
        all_ends = self._shard(shard).ends
        # ends are unsigned: compare inside the shard, where both bounds are not negative
        first = int(np.searchsorted(all_ends, np.uint64(max(start - base, 0)), side="right"))
        last = int(np.searchsorted(all_ends, np.uint64(stop - base), side="right"))
        before = int(all_ends[first - 1]) if first else 0
        ends = all_ends[first:last].astype(np.int64)
        if len(ends) and (int(ends[0]) <= before or not bool((ends[1:] > ends[:-1]).all())):
            raise CorpusError(
                "document ends do not rise: the index is damaged",
                where=ends_path(self.corpus.path, self.name, self.shards[shard].name),
                got=f"documents {first} to {last} of the shard",
                fix=f"{REBUILD}; flame-preprocess verify checks the rest",
            )
        ends += base
        return ends

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Return (start, stop) of a document in tokens of the split, EOS included."""
        shard, row = self._document_row(document)
        ends = self._shard(shard).ends
        base = self._token_starts[shard]
        return base + (int(ends[row - 1]) if row else 0), base + int(ends[row])

    def document_containing(self, token: int) -> int:
        """Return the number of the document that a token of the split belongs to."""
        shard, offset = self.locate(token)
        row = int(np.searchsorted(self._shard(shard).ends, np.uint64(offset), side="right"))
        return self._document_starts[shard] + row

    def provenance(self, document: int) -> dict[str, Any]:
        """Return a document's row of docs.parquet, or {} where provenance was not kept. Cost: reads one row group."""
        import pyarrow.parquet as pq  # costs a command that reads no provenance nothing

        shard, row = self._document_row(document)
        path = docs_path(self.corpus.path, self.name, self.shards[shard].name)
        if not path.exists():
            return {}
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if row < num_rows:
                    found: dict[str, Any] = file.read_row_group(group).slice(row, 1).to_pylist()[0]
                    return found
                row -= num_rows
        raise CorpusError("docs.parquet has fewer rows than the shard has documents", where=path, fix=REBUILD)

    def locate(self, token: int) -> tuple[int, int]:
        """Return (shard number, token within the shard) of a token of the split."""
        self._check_range(token, token + 1)
        shard = self._shard_of(token)
        return shard, token - self._token_starts[shard]

    # ---- checks

    def check(self) -> None:
        """Raise `CorpusError` unless every shard's files are there, of the right size and header, and agree.

        Cost: two opens and two reads a shard; whole checksums are `flame-preprocess verify`'s.
        """
        for number in range(len(self.shards)):
            self._open_shard(number)

    def _look_at_all(self) -> None:
        """Find a missing or truncated file early, by its size alone."""
        for shard in self.shards:
            for path, num_values, dtype in (
                (tokens_path(self.corpus.path, self.name, shard.name), shard.num_tokens, TOKEN_DTYPE),
                (ends_path(self.corpus.path, self.name, shard.name), shard.num_documents, END_DTYPE),
            ):
                expected = HEADER_BYTES + num_values * dtype.itemsize
                try:
                    size = path.stat().st_size
                except OSError as error:
                    self._early_error = CorpusError(f"a file of the corpus is absent: {error.strerror}", where=path)
                    return
                if size != expected:
                    self._early_error = CorpusError(
                        "a file of the corpus has the wrong size: it was cut or written over",
                        where=path,
                        got=f"{size} bytes",
                        expected=f"{expected} bytes",
                        fix=REBUILD,
                    )
                    return

    def _shard(self, number: int) -> _MappedShard:
        if self._early_error is not None:
            raise self._early_error
        with self._lock:
            mapped = self._mapped.get(number)
            if mapped is None:
                mapped = self._open_shard(number)
                self._mapped[number] = mapped
                if len(self._mapped) > MAX_MAPPED_SHARDS:
                    self._mapped.popitem(last=False)  # unmapped when its last reader lets go
            else:
                self._mapped.move_to_end(number)
            return mapped

    def _open_shard(self, number: int) -> _MappedShard:
        shard = self.shards[number]
        tokens_file = tokens_path(self.corpus.path, self.name, shard.name)
        ends_file = ends_path(self.corpus.path, self.name, shard.name)
        for path, dtype, expected, what in (
            (tokens_file, TOKEN_DTYPE, shard.num_tokens, "tokens"),
            (ends_file, END_DTYPE, shard.num_documents, "document ends"),
        ):
            if (length := read_npy_length(path, dtype)) != expected:
                raise CorpusError(
                    f"a shard's {what} are not those that the manifest names",
                    where=path,
                    got=f"{length} {what}",
                    expected=f"{expected} {what}",
                    fix=REBUILD,
                )
        mapped = _MappedShard(
            tokens=np.memmap(tokens_file, TOKEN_DTYPE, "r", HEADER_BYTES, (shard.num_tokens,)),
            ends=np.memmap(ends_file, END_DTYPE, "r", HEADER_BYTES, (shard.num_documents,)),
        )
        if int(mapped.ends[-1]) != shard.num_tokens or int(mapped.ends[0]) == 0:
            raise CorpusError(
                "a shard's document ends do not belong to its tokens",
                where=ends_file,
                got=f"a first end of {mapped.ends[0]} and a last of {mapped.ends[-1]}",
                expected=f"a first above 0 and a last of {shard.num_tokens}, the number of tokens",
                fix=REBUILD,
            )
        return mapped

    @cached_property
    def _shard_of(self) -> Callable[[int], int]:
        starts = self._token_starts
        return lambda token: bisect_right(starts, token) - 1

    def _document_row(self, document: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise UsageError(
                "there is no such document",
                where=f"{self.corpus.path}, split {self.name}",
                got=document,
                expected=f"a number from 0 to {self.num_documents - 1}",
            )
        shard = bisect_right(self._document_starts, document) - 1
        return shard, document - self._document_starts[shard]

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a split of {self.num_tokens}")


def _starts(counts: list[int]) -> list[int]:
    """Return where each of consecutive runs begins."""
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts
