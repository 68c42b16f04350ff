"""What one shard adds to the statistics of a corpus; shards are counted by processes, and nothing else is shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flame.errors import CorpusError
from flame.preprocess.distribution import Distribution
from flame.preprocess.duplicates import records_of
from flame.shards.format import RESTORE, docs_path
from flame.shards.manifest import ShardInfo
from flame.shards.maps import MappedShard, ShardFiles, map_shard
from flame.shards.provenance import damaged
from flame.words import counted

CHUNK_TOKENS = 1 << 20
DOCS_BATCH_ROWS = 1 << 14
MOST_IDS = 1 << 26  # a count an id: no tokenizer comes near it, a damaged shard may
NOWHERE = "(none)"
# scheme://user@host:port/…, and its host without www.
HOST = r"^\s*[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?(?:[Ww]{3}\.)?(?P<host>\[[^\]]*\]|[^/?#:]+)"
RATIO_STEPS = 100  # bytes per token are counted to 1/100
Rows = list[tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A shard to count; `first_document` numbers its documents, `duplicates` asks for their hashes."""

    corpus: Path
    split: str
    shard: ShardInfo
    first_document: int
    duplicates: bool


@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """Counts of one shard. Of text bytes and sources there are only those that docs.parquet tells, if it is there."""

    token_counts: NDArray[np.int64]
    lengths: Distribution
    byte_lengths: Distribution | None = None
    ratios: Distribution | None = None
    source_files: Rows = field(default_factory=list)
    hosts: Rows | None = None
    records: NDArray[np.void] | None = None


def count_shard(job: ShardJob) -> ShardStats:
    """Count a shard; damage is `CorpusError`. Memory: the maps' pages, chunks of 8 MiB, and 100 bytes a document."""
    files = ShardFiles(job.corpus, job.split, job.shard)
    mapped = map_shard(files)
    ends = mapped.ends.astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    if int(lengths.min()) < 1:
        raise CorpusError(
            "document ends do not rise: a shard's index is damaged",
            where=files.ends_path,
            got=f"a fall at its document {int(np.argmax(lengths < 1))}",
            fix=f"{RESTORE}; flame-preprocess verify checks every shard",
        )
    byte_lengths = ratios = hosts = None
    source_files: Rows = []
    path = docs_path(job.corpus, job.split, job.shard.name)
    if path.exists():
        num_bytes, source_files, hosts = _read_docs(path, lengths)
        byte_lengths = Distribution.of(num_bytes)
        ratios = Distribution.of(num_bytes * RATIO_STEPS // lengths)
    return ShardStats(
        token_counts=_count_tokens(mapped, job.shard, files.tokens_path),
        lengths=Distribution.of(lengths),
        byte_lengths=byte_lengths,
        ratios=ratios,
        source_files=source_files,
        hosts=hosts,
        records=records_of(mapped.tokens, ends, job.first_document) if job.duplicates else None,
    )


def _count_tokens(mapped: MappedShard, shard: ShardInfo, path: Path) -> NDArray[np.int64]:
    largest = shard.max_token_id
    counts = np.zeros(min(largest, MOST_IDS) + 1, np.int64)
    for start in range(0, len(mapped.tokens), CHUNK_TOKENS):
        chunk = mapped.tokens[start : start + CHUNK_TOKENS]
        if int(chunk.max()) >= len(counts):
            raise CorpusError(
                "a shard holds an id that cannot be right",
                where=path,
                got=int(chunk.max()),
                expected=f"none above {len(counts) - 1}",
                fix=f"{RESTORE}; flame-preprocess verify checks every shard",
            )
        counts += np.bincount(chunk, minlength=len(counts))
    return counts


def _read_docs(path: Path, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Rows, Rows | None]:
    """Return each document's bytes of text, and (name, documents, tokens) by source file and by host of `url`."""
    num_bytes: list[NDArray[np.int64]] = []
    sources: dict[str, tuple[int, int]] = {}
    hosts: dict[str, tuple[int, int]] | None = None
    start = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if file.metadata.num_rows != len(lengths):
                raise CorpusError(
                    "the provenance of a shard is not that of its documents",
                    where=path,
                    got=f"{counted(file.metadata.num_rows, 'row')}",
                    expected=f"{counted(len(lengths), 'row')}, one a document",
                    fix=RESTORE,
                )
            schema = file.schema_arrow
            has_url = "url" in schema.names and _is_text(schema.field("url").type)
            hosts = {} if has_url else None
            columns = ["source_file", "num_bytes", *(["url"] if has_url else [])]
            for batch in file.iter_batches(DOCS_BATCH_ROWS, columns=columns):
                tokens = pa.array(lengths[start : start + len(batch)])
                start += len(batch)
                num_bytes.append(batch.column("num_bytes").to_numpy(zero_copy_only=False).astype(np.int64))
                _add(sources, _grouped(batch.column("source_file"), tokens))
                if hosts is not None:
                    _add(hosts, _grouped(hosts_of(batch.column("url")), tokens))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise damaged(path, error) from error
    return np.concatenate(num_bytes), _rows(sources), None if hosts is None else _rows(hosts)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def hosts_of(urls: pa.Array) -> pa.Array:
    """Return the host of each url in lower case, without user, port and `www.`; null where there is none."""
    return pc.utf8_lower(pc.struct_field(pc.extract_regex(urls, HOST), "host"))


def _grouped(names: pa.Array, tokens: pa.Array) -> Iterator[tuple[str, int, int]]:
    table = (
        pa.table({"name": names, "tokens": tokens}).group_by("name").aggregate([("tokens", "sum"), ("tokens", "count")])
    )
    for name, total, number in zip(
        *(table.column(c).to_pylist() for c in ("name", "tokens_sum", "tokens_count")), strict=True
    ):
        yield NOWHERE if name is None else name, number, total


def _add(counts: dict[str, tuple[int, int]], rows: Iterator[tuple[str, int, int]]) -> None:
    for name, number, tokens in rows:
        before = counts.get(name, (0, 0))
        counts[name] = before[0] + number, before[1] + tokens


def _rows(counts: dict[str, tuple[int, int]]) -> Rows:
    return [(name, *both) for name, both in counts.items()]
