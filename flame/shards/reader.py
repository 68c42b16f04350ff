"""Reading a corpus: the tokens of a split as one long virtual array, mapped lazily, checked where they are touched."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import CorpusError, UsageError
from flame.shards.format import RESTORE, TOKEN_DTYPE, TOKENIZER_FOLDER, docs_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, read_manifest
from flame.shards.maps import MAPS, MappedShard, ShardFiles, check_sizes, map_shard

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from flame.shards.provenance import ProvenanceReader

CHECKING_THREADS = 8  # of `Split.check`: it waits for opens, which a network file system answers slowly


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document of a split: `ids` are uint32 `[num_tokens]`, EOS included; `text` is without EOS and BOS.

    `provenance` is its row of docs.parquet: source_file, row, num_bytes and the kept columns; {} where none was kept.
    """

    number: int
    ids: NDArray[np.uint32]
    text: str
    provenance: dict[str, Any]


class Corpus:
    """A sealed corpus. Opening reads manifest.json only; nothing is ever written into it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open the corpus in `path`; `UsageError` if the path does not exist, `CorpusError` if it is no corpus."""
        path = Path(path)
        if not path.exists():
            raise UsageError("there is no such corpus folder", got=path, fix="Check the path")
        return cls(path, read_manifest(path))

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def tokenizer_folder(self) -> Path:
        return self.path / TOKENIZER_FOLDER

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The corpus's own tokenizer; `TokenizerError` where it is lost. Cost: up to a second, once."""
        from flame.shards.tokenizer import load_tokenizer  # a trainer reads ids only

        return load_tokenizer(self.path)

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


class Split:
    """One split of a corpus: tokens numbered from 0 through all its shards. Safe to read from several threads.

    Shards are mapped, and checked, as they are first touched; meanwhile a thread looks at all their sizes, so that a
    missing or truncated one is named at the next read, wherever that is. Damage raises `CorpusError`.
    """

    def __init__(self, corpus: Corpus, name: str, info: SplitInfo) -> None:
        self.corpus = corpus
        self.name = name
        self.num_tokens = info.num_tokens
        self.num_documents = info.num_documents
        self.num_bytes = info.num_bytes
        self.max_token_id = info.max_token_id
        self.shards: tuple[ShardInfo, ...] = info.shards
        self._files = [ShardFiles(corpus.path, name, shard) for shard in info.shards]
        self._token_starts = _starts(shard.num_tokens for shard in info.shards)
        self._document_starts = _starts(shard.num_documents for shard in info.shards)
        self._provenance: ProvenanceReader | None = None
        self._early_error: CorpusError | None = None
        self._looking = threading.Thread(target=self._look_at_all, name=f"look at {corpus.path}", daemon=True)
        self._looking.start()

    def __repr__(self) -> str:
        return f"Split({str(self.corpus.path)!r}, {self.name!r})"

    # ---- tokens

    def read(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return a copy of the tokens `[start, stop)`."""
        self._check_range(start, stop)
        out = np.empty(stop - start, dtype=np.uint32)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` (1-D, uint32 or int32) with the tokens from `start` on. Cost: a copy, and a map per new shard."""
        assert out.dtype.itemsize == TOKEN_DTYPE.itemsize and out.ndim == 1, "4 bytes a token"
        start, length = index(start), len(out)
        self._check_range(start, start + length)
        if length == 0:
            return
        values = out.view(TOKEN_DTYPE)
        shard = self._shard_of(start)
        offset, done = start - self._token_starts[shard], 0
        while True:
            piece = self._map(shard).tokens[offset : offset + length - done]
            values[done : done + len(piece)] = piece
            done += len(piece)
            if done == length:
                return
            shard, offset = shard + 1, 0

    def advise_window(self, start: int, length: int) -> None:
        """Have the system read a window that `view_window` is about to show, and do not wait for it.

        So cold windows are read whole, and side by side. Of one that spans shards the first one's part. Cost: some µs.
        """
        shard = self._shard_of(start)
        first = start - self._token_starts[shard]
        self._map(shard).advise(first, min(length + 1, self.shards[shard].num_tokens - first))

    def view_window(self, start: int, length: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64], int]:
        """Return (tokens, ends, base): `length` tokens and the one that follows; the document ends inside the length.

        `ends - base` are exclusive, in tokens of the window. Both arrays are views of the maps, copies only where the
        window lies in several shards. That ends rise is left to the caller, who has many windows to check at once
        (`ends_between` names the damage). Cost: two bisections.
        """
        start = index(start)
        shard = bisect_right(self._token_starts, start) - 1
        first = start - self._token_starts[shard]
        stop = first + length
        if not 0 <= first < stop < self.shards[shard].num_tokens:
            ends = self.ends_between(start, start + length)
            return self.read(start, start + length + 1), ends.astype(np.uint64), start
        mapped = self._map(shard)
        values = mapped.end_values
        begin = bisect_right(values, first)
        end = bisect_right(values, stop, begin, min(begin + length, len(values)))
        return mapped.tokens[first : stop + 1], mapped.ends[begin:end], first

    def locate(self, token: int) -> tuple[int, int]:
        """Return (shard number, token within the shard) of a token of the split."""
        self._check_range(token, token + 1)
        shard = self._shard_of(index(token))
        return shard, index(token) - self._token_starts[shard]

    # ---- documents

    def ends_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document ends e (exclusive, in tokens of the split) with `start < e <= stop`, rising.

        That they rise is checked on what is returned. Cost: two bisections and a copy.
        """
        start, stop = index(start), index(stop)
        self._check_range(start, stop)
        if start == stop:
            return np.empty(0, dtype=np.int64)
        first = self._shard_of(start)
        if stop <= self._token_starts[first] + self.shards[first].num_tokens:
            return self._ends_in_shard(first, start, stop)
        shards = range(first, self._shard_of(stop - 1) + 1)
        return np.concatenate([self._ends_in_shard(shard, start, stop) for shard in shards])

    def _ends_in_shard(self, shard: int, start: int, stop: int) -> NDArray[np.int64]:
        base, mapped = self._token_starts[shard], self._map(shard)
        first, last = 0, len(mapped.end_values)
        if start > base:
            first = bisect_right(mapped.end_values, start - base)
        if stop - base < self.shards[shard].num_tokens:  # no more ends than tokens lie between the two
            last = bisect_right(mapped.end_values, stop - base, first, min(first + stop - start, last))
        around = mapped.ends[max(first - 1, 0) : last + 1]
        if np.count_nonzero(around[1:] > around[:-1]) != len(around) - 1:
            raise self._falling_ends(shard, first)
        ends = mapped.ends[first:last].astype(np.int64)
        ends += base
        return ends

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Return (start, stop) of a document in tokens of the split, EOS included."""
        shard, row = self._document_row(document)
        ends, base = self._map(shard).ends, self._token_starts[shard]
        start, stop = (int(ends[row - 1]) if row else 0), int(ends[row])
        if not start < stop <= self.shards[shard].num_tokens:
            raise self._falling_ends(shard, row)
        return base + start, base + stop

    def document_containing(self, token: int) -> int:
        """Return the number of the document that a token of the split belongs to."""
        shard, offset = self.locate(token)
        row = bisect_right(self._map(shard).end_values, offset)
        return self._document_starts[shard] + row

    def document(self, document: int) -> Document:
        """Return a document by its number, from 0; `CorpusError` if there is none of that number."""
        from flame.shards.tokenizer import document_text

        ids = self.read(*self.document_bounds(document))
        text = document_text(self.corpus.tokenizer, ids.tolist(), self.corpus.manifest.tokenizer)
        return Document(number=index(document), ids=ids, text=text, provenance=self.provenance(document))

    def provenance(self, document: int) -> dict[str, Any]:
        """Return a document's row of docs.parquet with values as JSON has them, or {} where provenance was not kept.

        Cost: a row group is read, and kept for the documents beside it.
        """
        from flame.shards.provenance import ProvenanceReader  # pyarrow: a trainer never needs it

        shard, row = self._document_row(document)
        info = self.shards[shard]
        if self._provenance is None:
            self._provenance = ProvenanceReader()
        path = docs_path(self.corpus.path, self.name, info.name)
        return self._provenance.row(path, row, num_documents=info.num_documents)

    # ---- checks

    def check(self) -> None:
        """Raise `CorpusError` unless every shard's files are there, of the right size and header, and agree.

        Cost: two opens and two pages a shard. Whole checksums are `flame-preprocess verify`'s.
        """
        with ThreadPoolExecutor(CHECKING_THREADS) as pool:
            for _ in pool.map(_open_once, self._files):
                pass

    def _look_at_all(self) -> None:
        try:
            for files in self._files:
                check_sizes(files)
        except CorpusError as error:
            self._early_error = error

    def _map(self, shard: int) -> MappedShard:
        if self._early_error is not None:
            raise self._early_error
        return MAPS.get(self._files[shard])

    def _shard_of(self, token: int) -> int:
        return bisect_right(self._token_starts, token) - 1

    def _document_row(self, document: int) -> tuple[int, int]:
        document = index(document)
        if not 0 <= document < self.num_documents:
            raise CorpusError(
                "the split has no such document",
                where=f"{self.corpus.path}, split {self.name}",
                got=document,
                expected=f"a number from 0 to {self.num_documents - 1}" if self.num_documents else "none: it is empty",
            )
        shard = bisect_right(self._document_starts, document) - 1
        return shard, document - self._document_starts[shard]

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a split of {self.num_tokens}")

    def _falling_ends(self, shard: int, row: int) -> CorpusError:
        return CorpusError(
            "document ends do not rise: a shard's index is damaged",
            where=self._files[shard].ends_path,
            got=f"a fall at or after its document {row}",
            fix=f"{RESTORE}; flame-preprocess verify checks every shard",
        )


def _open_once(files: ShardFiles) -> None:
    map_shard(files)  # the maps close as they are dropped


def _starts(counts: Iterable[int]) -> list[int]:
    """Return where each of consecutive runs begins; [0] for none, so that a bisection always finds one."""
    return list(accumulate(counts, initial=0))[:-1] or [0]
