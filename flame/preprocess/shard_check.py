"""One shard against its manifest: every byte, every boundary, every document's first and last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flame.errors import CorpusError
from flame.preprocess.problem import Problem, told
from flame.shards.format import (
    END_DTYPE,
    HEADER_BYTES,
    TOKEN_DTYPE,
    docs_path,
    ends_path,
    read_npy_length,
    tokens_path,
)
from flame.shards.manifest import ShardInfo
from flame.words import counted

CHUNK_BYTES = 1 << 24

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ContentRules:
    """What is true of every shard of a corpus.

    `bos_id` begins each document (None: none is asked for); `eos_only_last`: the text cannot hold the EOS token;
    `provenance`: there is a docs.parquet; `is_known` tells a token id of the tokenizer, and is asked only about ids
    from `vocab_size` on.
    """

    eos_id: int
    bos_id: int | None
    eos_only_last: bool
    provenance: bool
    vocab_size: int
    is_known: Callable[[int], bool]


def check_shard(corpus: Path, split: str, shard: ShardInfo, rules: ContentRules, advance: Advance) -> Iterator[Problem]:
    """Yield what is wrong with a shard's files. `advance` is told the bytes read. Memory: some chunks of 16 MiB."""
    ends_file, tokens_file = ends_path(corpus, split, shard.name), tokens_path(corpus, split, shard.name)
    ends = _Reading(ends_file, END_DTYPE, shard.num_documents, shard.ends_checksum, advance)
    ends_check = _EndsCheck(shard)
    yield from ends.check(ends_check)
    tokens = _Reading(tokens_file, TOKEN_DTYPE, shard.num_tokens, shard.tokens_checksum, advance)
    usable = ends.is_whole and not ends_check.problems
    yield from tokens.check(_TokensCheck(shard, rules, ends_file if usable else None))
    if rules.provenance:
        from flame.preprocess.docs_check import check_docs  # Arrow: not for -h

        yield from check_docs(docs_path(corpus, split, shard.name), shard)


class _Reading:
    """One `.npy` file read in chunks: hashed here, looked at by a check."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int, checksum: str, advance: Advance) -> None:
        self.path = path
        self.is_whole = False
        self._dtype = dtype
        self._length = length
        self._checksum = checksum
        self._advance = advance

    def check(self, check: _EndsCheck | _TokensCheck) -> Iterator[Problem]:
        path, item_bytes = self.path, self._dtype.itemsize
        sealed_bytes = HEADER_BYTES + self._length * item_bytes
        try:
            length = read_npy_length(path, self._dtype)
            if length != self._length:
                text = f"it holds {length} values, and the manifest says {self._length}"
                yield Problem(path=path, text=text, bytes=_wrong_bytes(path, sealed_bytes))
                return
            checksum = self._read(check)
        except CorpusError as error:
            is_read = error.__cause__ is None  # what could not be opened or read has no bytes to name
            yield Problem(path=path, text=told(error), bytes=_wrong_bytes(path, sealed_bytes) if is_read else None)
            return
        except OSError as error:
            yield Problem(path=path, text=f"cannot be read: {error.strerror or error!r}")
            return
        self.is_whole = True
        if checksum != self._checksum:
            text = f"its checksum is {checksum}, and the manifest says {self._checksum}"
            yield Problem(path=path, text=text, bytes=(HEADER_BYTES, sealed_bytes))
        for text, place in check.finish():
            start = HEADER_BYTES + place * item_bytes
            yield Problem(path=path, text=text, bytes=(start, start + item_bytes))

    def _read(self, check: _EndsCheck | _TokensCheck) -> str:
        digest = xxhash.xxh3_128()
        begin = 0
        with open(self.path, "rb", buffering=0) as file:
            file.seek(HEADER_BYTES)
            while begin < self._length:
                values = np.fromfile(file, self._dtype, min(CHUNK_BYTES // self._dtype.itemsize, self._length - begin))
                if len(values) == 0:
                    raise CorpusError("it was cut short while it was read")
                digest.update(values.data)
                check.look(begin, values)
                begin += len(values)
                self._advance(values.nbytes)
        return f"xxh3:{digest.hexdigest()}"


def _wrong_bytes(path: Path, sealed_bytes: int) -> tuple[int, int]:
    """Return the bytes that are missing or too many; the header, where the size is right."""
    size_bytes = path.stat().st_size
    if size_bytes == sealed_bytes:
        return 0, HEADER_BYTES
    return min(size_bytes, sealed_bytes), max(size_bytes, sealed_bytes)


class _Count:
    """How many things are wrong in the same way, and where the first is: its number, and its value in the file."""

    def __init__(self, what: str = "document") -> None:
        self.number = 0
        self.first = 0
        self.place = 0
        self._what = what

    def add(self, numbers: NDArray[np.integer[Any]], places: NDArray[np.integer[Any]]) -> None:
        if len(numbers) and self.number == 0:
            self.first, self.place = int(numbers[0]), int(places[0])
        self.number += len(numbers)

    def __str__(self) -> str:
        things = f"1 {self._what}" if self.number == 1 else f"{self.number} {self._what}s"
        return f"{things} (the shard's number {self.first}{' first' if self.number > 1 else ''})"


class _EndsCheck:
    """Document ends: the first above 0, each above the one before it, the last the number of tokens."""

    def __init__(self, shard: ShardInfo) -> None:
        self._shard = shard
        self._last = 0
        self._falling = _Count()
        self.problems: list[tuple[str, int]] = []

    def look(self, begin: int, values: NDArray[np.uint64]) -> None:
        before = np.concatenate([np.array([self._last], END_DTYPE), values[:-1]])
        falling = begin + np.flatnonzero(values <= before)
        self._falling.add(falling, falling)
        self._last = int(values[-1])

    def finish(self) -> list[tuple[str, int]]:
        """Return (what is wrong, the value where it is first)."""
        if self._falling.number:
            self.problems.append((f"{self._falling} end no later than the one before", self._falling.place))
        if self._last != self._shard.num_tokens:
            tokens = counted(self._shard.num_tokens, "token")
            text = f"the last document ends at {self._last}, and the shard has {tokens}"
            self.problems.append((text, self._shard.num_documents - 1))
        return self.problems


class _TokensCheck:
    """Tokens: none unknown, the largest as recorded; with `ends_file`, each document's first and last."""

    def __init__(self, shard: ShardInfo, rules: ContentRules, ends_file: Path | None) -> None:
        self._shard = shard
        self._rules = rules
        self._max, self._max_place = -1, 0
        self._ends: NDArray[np.uint64] | None = None
        if ends_file is not None:
            self._ends = np.memmap(ends_file, END_DTYPE, "r", HEADER_BYTES, (shard.num_documents,))
        self._unknown = _Count("token")
        self._without_eos, self._inner_eos, self._without_bos = _Count(), _Count(), _Count()

    def look(self, begin: int, values: NDArray[np.uint32]) -> None:
        largest = int(values.max())
        if largest > self._max:
            self._max, self._max_place = largest, begin + int(values.argmax())
        if largest >= self._rules.vocab_size:
            beyond = np.flatnonzero(values >= self._rules.vocab_size)
            ids, inverse = np.unique(values[beyond], return_inverse=True)
            unknown = begin + beyond[np.array([not self._rules.is_known(int(token)) for token in ids])[inverse]]
            self._unknown.add(unknown, unknown)
        if self._ends is not None:
            self._look_at_documents(begin, values, self._ends)

    def _look_at_documents(self, begin: int, values: NDArray[np.uint32], ends: NDArray[np.uint64]) -> None:
        rules, is_eos = self._rules, values == self._rules.eos_id
        first, after = (int(ends.searchsorted(np.uint64(place), "right")) for place in (begin, begin + len(values)))
        last_tokens = ends[first:after].astype(np.int64) - 1 - begin
        wrong = np.flatnonzero(~is_eos[last_tokens])
        self._without_eos.add(first + wrong, begin + last_tokens[wrong])
        is_eos[last_tokens] = False
        if rules.bos_id is not None:
            first, first_tokens = _first_tokens(begin, begin + len(values), ends)
            wrong = np.flatnonzero(values[first_tokens] != rules.bos_id)
            self._without_bos.add(first + wrong, begin + first_tokens[wrong])
            if rules.bos_id == rules.eos_id:
                is_eos[first_tokens] = False
        if rules.eos_only_last:
            inner = begin + np.flatnonzero(is_eos)
            documents, places = np.unique(ends.searchsorted(inner.astype(np.uint64), "right"), return_index=True)
            self._inner_eos.add(documents, inner[places])

    def finish(self) -> Iterator[tuple[str, int]]:
        """Yield (what is wrong, the value where it is first)."""
        rules = self._rules
        if self._max != self._shard.max_token_id:
            text = f"its largest token is {self._max}, and the manifest says {self._shard.max_token_id}"
            yield text, self._max_place
        if self._unknown.number:
            text = f"{self._unknown} that the tokenizer does not have, the largest token being {self._max}"
            yield text, self._unknown.place
        for count, wrong in (
            (self._without_eos, f"without the EOS {rules.eos_id} at the end"),
            (self._inner_eos, f"with the EOS {rules.eos_id} before the end"),
            (self._without_bos, f"without the BOS {rules.bos_id} at the start"),
        ):
            if count.number:
                yield f"{count} {wrong}", count.place


def _first_tokens(begin: int, stop: int, ends: NDArray[np.uint64]) -> tuple[int, NDArray[np.int64]]:
    """Return the first document that starts in tokens [begin, stop), and where those that do start, from `begin`."""
    first, after = (int(ends.searchsorted(np.uint64(place), "left")) + 1 for place in (begin, stop))
    starts = ends[first - 1 : after - 1].astype(np.int64) - begin
    return (0, np.concatenate([np.zeros(1, np.int64), starts])) if begin == 0 else (first, starts)
