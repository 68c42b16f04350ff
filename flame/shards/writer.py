"""Writing shards: once, in order, hashed on the way, and published by rename.

A shard's files appear under their final names only when all of them are whole and durable. That a task's shards belong
to a corpus is said by its receipt, which the builder publishes after them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from flame.files import fsync_file, named_disk_errors, publish, temporary_path
from flame.shards.format import END_DTYPE, HEADER_BYTES, TOKEN_DTYPE, npy_header, shard_name
from flame.shards.manifest import ShardInfo

DOCS_ROW_GROUP = 1 << 16
PROVENANCE_FIELDS = (
    pa.field("source_file", pa.string()),
    pa.field("row", pa.uint64()),
    pa.field("num_bytes", pa.uint32()),
)


class ArrayFile:
    """One `.npy` file being written: appended to, hashed, then sealed with its true length.

    `append` takes values of `dtype`; the checksum is xxh3-128 of the payload, after the header.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.path = path
        self.length = 0
        self._dtype = dtype
        self._digest = xxhash.xxh3_128()
        self._temporary = temporary_path(path)
        with named_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._temporary, "wb", buffering=0)  # noqa: SIM115
            self._file.write(npy_header(dtype, 0))

    def append(self, values: NDArray[np.unsignedinteger]) -> None:
        """Write `values` (1-D) behind the others."""
        data = np.ascontiguousarray(values, dtype=self._dtype).view(np.uint8).data
        self._digest.update(data)
        written = 0
        with named_disk_errors(self.path, len(data)):
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        self.length += len(values)

    def seal(self) -> str:
        """Patch the header, make the bytes durable, close; returns the checksum. The name is still temporary."""
        with named_disk_errors(self.path, HEADER_BYTES):
            os.pwrite(self._file.fileno(), npy_header(self._dtype, self.length), 0)
            os.fsync(self._file.fileno())
            self._file.close()
        return f"xxh3:{self._digest.hexdigest()}"

    def publish(self) -> None:
        """Give the sealed file its name."""
        publish(self._temporary, self.path)

    def abort(self) -> None:
        """Close and delete what was written."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class ShardWriter:
    """Writes one shard: whole documents, in order. Call `finish`, or `abort` to leave nothing behind.

    `docs_schema` is the schema of docs.parquet (None keeps no provenance).
    """

    def __init__(self, folder: Path, name: str, docs_schema: pa.Schema | None) -> None:
        self.name = name
        self.num_bytes = 0
        self.max_token_id = 0
        self._tokens = ArrayFile(folder / f"{name}.tokens.npy", TOKEN_DTYPE)
        self._ends = ArrayFile(folder / f"{name}.ends.npy", END_DTYPE)
        self._docs_path = folder / f"{name}.docs.parquet"
        self._docs = None if docs_schema is None else _DocsFile(self._docs_path, docs_schema)

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
        assert len(ends) == 0 or (int(ends[-1]) == len(tokens) and int(np.min(lengths)) > 0), (
            "whole, non-empty documents"
        )
        assert (docs is None) == (self._docs is None), "provenance for every document or for none"
        if len(ends) == 0:
            return
        self._ends.append(ends + np.uint64(self.num_tokens))
        self._tokens.append(tokens)
        self.max_token_id = max(self.max_token_id, int(tokens.max()))
        if self._docs is not None and docs is not None:
            assert docs.num_rows == len(ends), "a row of provenance a document"
            self._docs.append(docs)
            num_bytes = int(np.sum(docs.column("num_bytes").to_numpy(), dtype=np.int64))
        assert num_bytes is not None, "num_bytes is given where there is no provenance"
        self.num_bytes += num_bytes

    def finish(self) -> ShardInfo:
        """Make all files durable, publish them, and return what the shard holds."""
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


class _DocsFile:
    """docs.parquet being written, in row groups of a fixed size: the same rows, however they were appended."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._temporary = temporary_path(path)
        self._schema = schema
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        with named_disk_errors(path):
            self._writer = pq.ParquetWriter(self._temporary, schema, compression="zstd")

    def append(self, docs: pa.Table) -> None:
        self._waiting.append(docs.select(self._schema.names).cast(self._schema))
        self._num_waiting += docs.num_rows
        if self._num_waiting >= DOCS_ROW_GROUP:
            table = pa.concat_tables(self._waiting)
            whole = self._num_waiting - self._num_waiting % DOCS_ROW_GROUP
            self._write(table.slice(0, whole))
            self._waiting, self._num_waiting = [table.slice(whole)], self._num_waiting - whole

    def _write(self, table: pa.Table) -> None:
        with named_disk_errors(self._path, table.nbytes):
            self._writer.write_table(table.combine_chunks(), row_group_size=DOCS_ROW_GROUP)

    def seal(self) -> None:
        if self._num_waiting:
            self._write(pa.concat_tables(self._waiting))
        with named_disk_errors(self._path):
            self._writer.close()
            fsync_file(self._temporary)

    def publish(self) -> None:
        publish(self._temporary, self._path)

    def abort(self) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)


class SplitWriter:
    """Writes one task's documents of one split into shards `shard-TTTTT-PPP`, in order; never an empty one.

    A shard ends at the first document end at or past `shard_tokens`: a document longer than that is one shard's.
    """

    def __init__(
        self, corpus: Path, split: str, *, task: int, shard_tokens: int, docs_schema: pa.Schema | None
    ) -> None:
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
