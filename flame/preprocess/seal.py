"""From finished tasks to a sealed corpus: held-out documents merged, receipts added up, the manifest last."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flame.errors import InputError
from flame.files import named_disk_errors, remove_tree
from flame.preprocess.blocks import Tokenized, write
from flame.preprocess.folder import VAL_PARTS, receipt_path
from flame.preprocess.holdout import HASH_COLUMN, first_copies
from flame.preprocess.records import checksum_of, damaged
from flame.preprocess.tokenizer_check import tokenizer_files
from flame.shards.checksum import payload_checksum
from flame.shards.format import HEADER_BYTES, REJECTS_FOLDER, TOKEN_DTYPE, docs_path, ends_path, tokens_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, TokenizerInfo, write_manifest
from flame.shards.writer import SplitWriter

CHUNK_TOKENS = 2**22


def seal(
    corpus: Path,
    receipts: Mapping[int, Mapping[str, Any]],
    *,
    tokenizer: TokenizerInfo,
    held_out: bool,
    shard_tokens: int,
    docs_schema: pa.Schema | None,
    engine: Mapping[str, Any],
    options: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> Manifest:
    """Write val/ and the manifest, and delete the tasks' parts of val; returns the manifest.

    May be killed and run again at any moment. Raises `InputError`, and seals nothing, where no document is left.
    """
    ordered = [receipts[task] for task in sorted(receipts)]
    rejects: Counter[str] = Counter()
    repaired: Counter[str] = Counter()
    for receipt in ordered:
        rejects.update(receipt["rejects"])
        repaired.update(receipt["repaired"])
    splits = {"train": SplitInfo.of(_shards(ordered, "train"))}
    if held_out:
        for receipt in ordered:
            _check_parts(corpus, receipt)
        parts = _shards(ordered, VAL_PARTS.name)
        merged, copies = _merge_val(corpus, parts, shard_tokens=shard_tokens, docs_schema=docs_schema)
        splits["val"] = SplitInfo.of(merged)
        rejects.update({"val_duplicate": copies} if copies else {})
    if not any(split.num_documents for split in splits.values()):
        raise InputError(
            "there is no document to write: the corpus would be empty",
            got=", ".join(f"{number} {reason}" for reason, number in sorted(rejects.items())) or "no rows",
            fix="Check the inputs"
            + (" and --text_column" if "text_column" in options else "")
            + (f"; {corpus / REJECTS_FOLDER} names what is malformed" if (corpus / REJECTS_FOLDER).is_dir() else ""),
        )
    manifest = Manifest(
        tokenizer=tokenizer,
        splits=splits,
        tokenizer_files=tokenizer_files(corpus),
        rejects=dict(sorted(rejects.items())),
        engine=engine,
        options=options,
        inputs={**inputs, "repaired": dict(sorted(repaired.items()))},
        built={
            "flame_version": metadata.version("flame"),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": platform.node(),
        },
    )
    write_manifest(corpus, manifest)
    remove_tree(corpus / VAL_PARTS)
    return manifest


def _shards(receipts: Sequence[Mapping[str, Any]], split: str) -> tuple[ShardInfo, ...]:
    return tuple(ShardInfo(**shard) for receipt in receipts for shard in receipt["splits"][split])


def _check_parts(corpus: Path, receipt: Mapping[str, Any]) -> None:
    """Raise `CorpusError` unless a task's part of val is as it was written: merged, it gets checksums of its own."""
    folder, split = corpus / VAL_PARTS.parent, VAL_PARTS.name
    for shard, docs_checksum in zip(receipt["splits"][split], receipt["val_docs"], strict=True):
        name = shard["name"]
        for path, checksum, expected in (
            (tokens_path(folder, split, name), payload_checksum, shard["tokens_checksum"]),
            (ends_path(folder, split, name), payload_checksum, shard["ends_checksum"]),
            (docs_path(folder, split, name), _file_checksum, docs_checksum),
        ):
            if checksum(path) != expected:
                raise damaged(
                    path,
                    got="its content was changed after it was written",
                    fix=f"Delete {receipt_path(corpus, receipt['task'])} and run the same command again: its task is "
                    "run again",
                )


def _file_checksum(path: Path) -> str | None:
    return checksum_of(path.read_bytes()) if path.is_file() else None


def _merge_val(
    corpus: Path, parts: Sequence[ShardInfo], *, shard_tokens: int, docs_schema: pa.Schema | None
) -> tuple[tuple[ShardInfo, ...], int]:
    """Write one copy of each held-out text into full shards; returns them and the number of copies left out.

    Cost: one reading of the parts, and 16 bytes a held-out document in memory.
    """
    folder, split = corpus / VAL_PARTS.parent, VAL_PARTS.name
    docs = [docs_path(folder, split, part.name) for part in parts]
    hashes = [pq.read_table(path, columns=[HASH_COLUMN]).column(HASH_COLUMN) for path in docs]
    if not hashes:
        return (), 0
    keep = first_copies(pa.chunked_array([chunk for column in hashes for chunk in column.chunks]))
    writer = SplitWriter(corpus, "val", task=0, shard_tokens=shard_tokens, docs_schema=docs_schema)
    begin = 0
    with named_disk_errors(corpus / "val", sum(path.stat().st_size for path in (corpus / VAL_PARTS).iterdir())):
        try:
            for part in parts:
                for documents in _read_part(folder, split, part.name, docs_schema):
                    write(writer, documents.take(np.flatnonzero(keep[begin : begin + len(documents)])))
                    begin += len(documents)
            shards = writer.finish()
        except BaseException:
            writer.abort()
            raise
    return tuple(shards), int(np.count_nonzero(~keep))


def _read_part(folder: Path, split: str, name: str, docs_schema: pa.Schema | None) -> Iterator[Tokenized]:
    """Yield a part's documents, about `CHUNK_TOKENS` at a time."""
    ends = np.fromfile(ends_path(folder, split, name), dtype=np.int64, offset=HEADER_BYTES)
    tokens = np.memmap(tokens_path(folder, split, name), dtype=TOKEN_DTYPE, mode="r", offset=HEADER_BYTES)
    docs = pq.read_table(docs_path(folder, split, name))
    whole = Tokenized(
        tokens=tokens,
        lengths=np.diff(ends, prepend=0),
        num_bytes=docs.column("num_bytes").to_numpy().astype(np.int64),
        docs=None if docs_schema is None else docs.select(docs_schema.names),
    )
    start = 0
    while start < len(whole):
        before = int(ends[start - 1]) if start else 0
        stop = min(int(np.searchsorted(ends, before + CHUNK_TOKENS)) + 1, len(whole))
        yield whole.slice(start, stop)
        start = stop
