"""One shard against its manifest: every byte, every boundary, every document's first and last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flame.errors import CorpusError, FlameError
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

CHUNK_BYTES = 1 << 24
DOCS_BATCH_ROWS = 1 << 12

Problem = tuple[Path, str]
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ContentRules:
    """What is true of every shard of a corpus.

    `bos_id` begins each document (None: none is asked for); `eos_only_last`: the text cannot hold the EOS token;
    `provenance`: there is a docs.parquet; `is_known` tells a token id of the tokenizer.
    """

    eos_id: int
    bos_id: int | None
    eos_only_last: bool
    provenance: bool
    is_known: Callable[[int], bool]


def told(error: FlameError) -> str:
    """Return what an error says but for the path, which a finding begins with."""
    facts = [
        f"{name} {value}" for name, value in (("got", error.got), ("expected", error.expected)) if value is not None
    ]
    return error.what + (f" ({'; '.join(facts)})" if facts else "")


def check_shard(corpus: Path, split: str, shard: ShardInfo, rules: ContentRules, advance: Advance) -> Iterator[Problem]:
    """Yield (file, what is wrong with it). `advance` is told the bytes read. Memory: some chunks of 16 MiB."""
    ends_file, tokens_file = ends_path(corpus, split, shard.name), tokens_path(corpus, split, shard.name)
    ends = _Reading(ends_file, END_DTYPE, shard.num_documents, shard.ends_checksum, advance)
    ends_check = _EndsCheck(shard)
    yield from ends.check(ends_check)
    tokens = _Reading(tokens_file, TOKEN_DTYPE, shard.num_tokens, shard.tokens_checksum, advance)
    usable = ends.is_whole and not ends_check.problems
    yield from tokens.check(_TokensCheck(shard, rules, ends_file if usable else None))
    if rules.provenance:
        path = docs_path(corpus, split, shard.name)
        yield from ((path, problem) for problem in _check_docs(path, shard))


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
        try:
            length = read_npy_length(self.path, self._dtype)
            if length != self._length:
                yield self.path, f"it holds {length} values, and the manifest says {self._length}"
                return
            checksum = self._read(check)
        except CorpusError as error:
            yield self.path, told(error)
            return
        except OSError as error:
            yield self.path, f"cannot be read: {error.strerror or error!r}"
            return
        self.is_whole = True
        if checksum != self._checksum:
            yield self.path, f"its checksum is {checksum}, and the manifest says {self._checksum}"
        for problem in check.finish():
            yield self.path, problem

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


class _Count:
    """How many documents have something wrong, and which is the first."""

    def __init__(self) -> None:
        self.number = 0
        self.first = 0

    def add(self, documents: NDArray[np.integer[Any]]) -> None:
        if len(documents) and self.number == 0:
            self.first = int(documents[0])
        self.number += len(documents)

    def __str__(self) -> str:
        documents = "1 document" if self.number == 1 else f"{self.number} documents"
        return f"{documents} (the shard's number {self.first}{' first' if self.number > 1 else ''})"


class _EndsCheck:
    """Document ends: the first above 0, each above the one before it, the last the number of tokens."""

    def __init__(self, shard: ShardInfo) -> None:
        self._shard = shard
        self._last = 0
        self._falling = _Count()
        self.problems: list[str] = []

    def look(self, begin: int, values: NDArray[np.uint64]) -> None:
        before = np.concatenate([np.array([self._last], END_DTYPE), values[:-1]])
        self._falling.add(begin + np.flatnonzero(values <= before))
        self._last = int(values[-1])

    def finish(self) -> list[str]:
        if self._falling.number:
            self.problems.append(f"{self._falling} end no later than the one before")
        if self._last != self._shard.num_tokens:
            self.problems.append(
                f"the last document ends at {self._last}, and the shard has {self._shard.num_tokens} tokens"
            )
        return self.problems


class _TokensCheck:
    """Tokens: none unknown, the largest as recorded; with `ends_file`, each document's first and last."""

    def __init__(self, shard: ShardInfo, rules: ContentRules, ends_file: Path | None) -> None:
        self._shard = shard
        self._rules = rules
        self._max = 0
        self._ends: NDArray[np.uint64] | None = None
        if ends_file is not None:
            self._ends = np.memmap(ends_file, END_DTYPE, "r", HEADER_BYTES, (shard.num_documents,))
        self._without_eos, self._inner_eos, self._without_bos = _Count(), _Count(), _Count()

    def look(self, begin: int, values: NDArray[np.uint32]) -> None:
        self._max = max(self._max, int(values.max()))
        if self._ends is not None:
            self._look_at_documents(begin, values, self._ends)

    def _look_at_documents(self, begin: int, values: NDArray[np.uint32], ends: NDArray[np.uint64]) -> None:
        rules, is_eos = self._rules, values == self._rules.eos_id
        first, after = (int(ends.searchsorted(np.uint64(place), "right")) for place in (begin, begin + len(values)))
        last_tokens = ends[first:after].astype(np.int64) - 1 - begin
        self._without_eos.add(first + np.flatnonzero(~is_eos[last_tokens]))
        is_eos[last_tokens] = False
        if rules.bos_id is not None:
            first, first_tokens = _first_tokens(begin, begin + len(values), ends)
            self._without_bos.add(first + np.flatnonzero(values[first_tokens] != rules.bos_id))
            if rules.bos_id == rules.eos_id:
                is_eos[first_tokens] = False
        if rules.eos_only_last:
            inner = np.flatnonzero(is_eos).astype(np.uint64) + np.uint64(begin)
            self._inner_eos.add(np.unique(ends.searchsorted(inner, "right")))

    def finish(self) -> Iterator[str]:
        rules = self._rules
        if self._max != self._shard.max_token_id:
            yield f"its largest token is {self._max}, and the manifest says {self._shard.max_token_id}"
        if not rules.is_known(self._max):
            yield f"its largest token is {self._max}, which the tokenizer does not have"
        if self._without_eos.number:
            yield f"{self._without_eos} without the EOS {rules.eos_id} at the end"
        if self._inner_eos.number:
            yield f"{self._inner_eos} with the EOS {rules.eos_id} before the end"
        if self._without_bos.number:
            yield f"{self._without_bos} without the BOS {rules.bos_id} at the start"


def _first_tokens(begin: int, stop: int, ends: NDArray[np.uint64]) -> tuple[int, NDArray[np.int64]]:
    """Return the first document that starts in tokens [begin, stop), and where those that do start, from `begin`."""
    first, after = (int(ends.searchsorted(np.uint64(place), "left")) + 1 for place in (begin, stop))
    starts = ends[first - 1 : after - 1].astype(np.int64) - begin
    return (0, np.concatenate([np.zeros(1, np.int64), starts])) if begin == 0 else (first, starts)


def _check_docs(path: Path, shard: ShardInfo) -> Iterator[str]:
    """Yield what is wrong with a docs.parquet: every page is read and its checksum compared."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from flame.shards.provenance import PROVENANCE_FIELDS

    num_rows = num_bytes = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for field in PROVENANCE_FIELDS:
                index = file.schema_arrow.get_field_index(field.name)
                if index < 0 or file.schema_arrow.field(index).type != field.type:
                    yield f"it has no column {field.name} of type {field.type}"
                    return
            for batch in file.iter_batches(DOCS_BATCH_ROWS):
                num_rows += batch.num_rows
                num_bytes += int(np.sum(batch.column("num_bytes").to_numpy(zero_copy_only=False), dtype=np.int64))
    except FileNotFoundError:
        yield "a file of the corpus is absent"
        return
    except (OSError, pa.ArrowException) as error:
        yield f"it cannot be read: {' '.join(str(error).split())}"
        return
    if num_rows != shard.num_documents:
        yield f"it has {num_rows} rows, and the shard {shard.num_documents} documents"
    if num_bytes != shard.num_bytes:
        yield f"its num_bytes sum to {num_bytes}, and the manifest says {shard.num_bytes}"
