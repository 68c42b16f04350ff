"""Writing shards: once, in order, hashed on the way, and published by rename.

A shard's files get their final names only when all of them are whole and durable, its tokens last. That a task's
shards belong to a corpus is said by the task's receipt, which the builder publishes after them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.shards.array_file import ArrayFile
from flame.shards.format import END_DTYPE, TOKEN_DTYPE, docs_path, ends_path, shard_name, tokens_path
from flame.shards.manifest import ShardInfo
from flame.shards.provenance import PROVENANCE_FIELDS as PROVENANCE_FIELDS  # the schema that `docs` begins with
from flame.shards.provenance import ProvenanceFile


class ShardWriter:
    """Writes one shard: whole documents, in order. Call `finish`, or `abort` to leave nothing behind.

    `docs_schema` is the schema of docs.parquet (None keeps no provenance). A full disk raises `FlameError` with the
    path and the bytes needed; the shard is then only good for `abort`.
    """

    def __init__(self, folder: Path, name: str, docs_schema: pa.Schema | None) -> None:
        corpus, split = folder.parent, folder.name
        self.name = name
        self.num_bytes = 0
        self.max_token_id = 0
        with contextlib.ExitStack() as undo:
            self._tokens = ArrayFile(tokens_path(corpus, split, name), TOKEN_DTYPE)
            undo.callback(self._tokens.abort)
            self._ends = ArrayFile(ends_path(corpus, split, name), END_DTYPE)
            undo.callback(self._ends.abort)
            self._docs = None if docs_schema is None else ProvenanceFile(docs_path(corpus, split, name), docs_schema)
            undo.pop_all()

    @property
    def num_tokens(self) -> int:
        return self._tokens.length

    @property
    def num_documents(self) -> int:
        return self._ends.length

    def append(
        self,
        tokens: NDArray[np.uint32],
        lengths: NDArray[np.integer[Any]],
        docs: pa.Table | None = None,
        *,
        num_bytes: int | None = None,
    ) -> None:
        """Append whole documents, EOS included: their `lengths` sum to `len(tokens)`, each at least 1.

        `docs` has a row a document where provenance is kept; `num_bytes` is their text's size where it is not.
        """
        ends = np.cumsum(lengths, dtype=np.uint64)
        if len(ends) == 0:
            assert len(tokens) == 0, "no documents, no tokens"
            return
        assert int(ends[-1]) == len(tokens) and int(np.min(lengths)) > 0, "whole, non-empty documents"
        assert (docs is None) == (self._docs is None), "provenance for every document or for none"
        self._tokens.append(tokens)
        self._ends.append(ends + np.uint64(self.num_tokens - len(tokens)))
        self.max_token_id = max(self.max_token_id, int(tokens.max()))
        if self._docs is not None and docs is not None:
            assert docs.num_rows == len(ends), "a row of provenance a document"
            self._docs.append(docs)
            num_bytes = int(np.sum(docs.column("num_bytes").to_numpy(), dtype=np.int64))
        assert num_bytes is not None, "num_bytes is given where there is no provenance"
        self.num_bytes += num_bytes

    def finish(self) -> ShardInfo:
        """Make all files durable, publish them, and return what the shard holds."""
        assert self.num_documents > 0, "a shard is never empty"
        tokens_checksum, ends_checksum = self._tokens.seal(), self._ends.seal()
        if self._docs is not None:
            self._docs.seal()
            self._docs.publish()
        self._ends.publish()
        self._tokens.publish()
        return ShardInfo(
            name=self.name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_bytes=self.num_bytes,
            max_token_id=self.max_token_id,
            tokens_checksum=tokens_checksum,
            ends_checksum=ends_checksum,
        )

    def abort(self) -> None:
        """Delete what was written under temporary names."""
        self._tokens.abort()
        self._ends.abort()
        if self._docs is not None:
            self._docs.abort()


class SplitWriter:
    """Writes one task's documents of one split into shards `shard-TTTTT-PPP`, in order; never an empty one.

    A shard ends at the first document end at or past `shard_tokens`, so that a document longer than that is still one
    document of one shard. The same documents give the same files, however they are cut into calls of `append`.
    """

    def __init__(
        self, corpus: Path, split: str, *, task: int, shard_tokens: int, docs_schema: pa.Schema | None
    ) -> None:
        assert shard_tokens > 0, "a shard has room for a token"
        self._folder = corpus / split
        self._task = task
        self._shard_tokens = shard_tokens
        self._docs_schema = docs_schema
        self._open: ShardWriter | None = None
        self._finished: list[ShardInfo] = []

    def append(
        self,
        tokens: NDArray[np.uint32],
        lengths: NDArray[np.integer[Any]],
        docs: pa.Table | None = None,
        *,
        num_bytes: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Append whole documents (`ShardWriter.append`); `num_bytes`, one a document, where there is no provenance."""
        ends = np.cumsum(lengths, dtype=np.int64)
        assert len(tokens) == (int(ends[-1]) if len(ends) else 0), "lengths sum to the tokens"
        document = 0
        while document < len(ends):
            writer = self._writer()
            start = int(ends[document - 1]) if document else 0
            room = self._shard_tokens - writer.num_tokens
            stop = min(int(np.searchsorted(ends, start + room, side="left")) + 1, len(ends))
            writer.append(
                tokens[start : int(ends[stop - 1])],
                lengths[document:stop],
                None if docs is None else docs.slice(document, stop - document),
                num_bytes=None if num_bytes is None else int(num_bytes[document:stop].sum()),
            )
            document = stop
            if writer.num_tokens >= self._shard_tokens:
                self._finished.append(writer.finish())
                self._open = None

    def _writer(self) -> ShardWriter:
        if self._open is None:
            name = shard_name(self._task, len(self._finished))
            self._open = ShardWriter(self._folder, name, self._docs_schema)
        return self._open

    def finish(self) -> list[ShardInfo]:
        """Publish the last shard and return all of them, in order."""
        if self._open is not None:
            self._finished.append(self._open.finish())
            self._open = None
        return self._finished

    def abort(self) -> None:
        """Delete the shard that is being written; finished ones stay, and no receipt names them."""
        if self._open is not None:
            self._open.abort()
            self._open = None
