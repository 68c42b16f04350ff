"""Where the documents of a task go: into shards of train or, held out, of val, and last a receipt."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.preprocess.blocks import BlockShuffler, Tokenized, write
from flame.preprocess.folder import VAL_PARTS, receipt_path
from flame.preprocess.holdout import HASH_COLUMN, held_out, text_hashes
from flame.preprocess.records import checksum_of, write_record
from flame.preprocess.rejects import Rejects
from flame.preprocess.task_settings import TaskSettings
from flame.shards.format import docs_path
from flame.shards.writer import PROVENANCE_FIELDS, SplitWriter


class TaskOutput:
    """A context that writes a task's documents; an error within leaves no file behind.

    Cost: memory is bounded by a block of the shuffle and the largest document.
    """

    def __init__(self, task: int, settings: TaskSettings) -> None:
        self._task = task
        self._settings = settings
        self._train = SplitWriter(
            settings.corpus, "train", task=task, shard_tokens=settings.shard_tokens, docs_schema=settings.docs_schema
        )
        self._val = SplitWriter(
            settings.corpus / VAL_PARTS.parent,
            VAL_PARTS.name,
            task=task,
            shard_tokens=settings.shard_tokens,
            docs_schema=settings.val_schema,
        )
        self._shuffler = BlockShuffler(
            self._train, block_tokens=settings.shuffle_block_tokens, key=f"block|{settings.shuffle_seed}|{task}"
        )

    def __enter__(self) -> TaskOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._train.abort()
            self._val.abort()

    def append(self, documents: Tokenized, texts: pa.LargeStringArray, parts: NDArray[np.int64] | None = None) -> None:
        """Write documents, of which `texts` are the texts, and `parts` the numbers within those that were cut."""
        if self._settings.val_fraction > 0:
            documents = _hold_out(documents, texts, self._settings.val_fraction, self._val, parts)
        if not self._settings.provenance:
            documents = dataclasses.replace(documents, docs=None)
        if self._settings.shuffle_seed is None:
            write(self._train, documents)
        else:
            self._shuffler.append(documents)

    def finish(self) -> dict[str, list[dict[str, Any]]]:
        """Publish the last shards; returns what each split's shards hold, for the receipt."""
        self._shuffler.flush()
        splits = {"train": self._train.finish(), VAL_PARTS.name: self._val.finish()}
        return {name: [dataclasses.asdict(shard) for shard in shards] for name, shards in splits.items()}


def write_receipt(
    task: int,
    settings: TaskSettings,
    rejects: Rejects,
    splits: dict[str, list[dict[str, Any]]],
    *,
    engine: str,
    redone: str | None = None,
) -> None:
    """Write what a finished task made, when all of its files are in place; `redone` says why it was done again.

    What is held out is read again when it is merged, so that checksums are kept of all its files.
    """
    val = settings.corpus / VAL_PARTS.parent, VAL_PARTS.name
    receipt = {
        "task": task,
        "plan": settings.plan_digest,
        "engine": engine,
        "redone": redone,
        "rejects": dict(sorted(rejects.counts.items())),
        "errors": rejects.errors,
        "repaired": dict(sorted(rejects.repaired.items())),
        "splits": splits,
        "val_docs": [
            checksum_of(docs_path(*val, shard["name"]).read_bytes()) for shard in splits.get(VAL_PARTS.name, [])
        ],
    }
    write_record(receipt_path(settings.corpus, task), receipt)


def provenance_table(
    path: str, rows: NDArray[np.uint64], num_bytes: NDArray[np.int64], kept: pa.Table | None
) -> pa.Table:
    """Return the rows of docs.parquet of documents of one file: `rows` and `num_bytes` are an entry each."""
    arrays = [pa.repeat(pa.scalar(path), len(rows)), pa.array(rows), pa.array(num_bytes.astype(np.uint32))]
    table = pa.table(arrays, schema=pa.schema(PROVENANCE_FIELDS))
    if kept is not None:
        for field in kept.schema:
            table = table.append_column(field, kept.column(field.name))
    return table


def _hold_out(
    tokenized: Tokenized,
    texts: pa.LargeStringArray,
    val_fraction: float,
    val: SplitWriter,
    parts: NDArray[np.int64] | None = None,
) -> Tokenized:
    """Write what is held out, with the hash by which copies are told; return the rest.

    All `parts` of a text are on the same side, and are no copies of each other.
    """
    mask = held_out(texts, val_fraction)
    if not mask.any():
        return tokenized
    chosen = np.flatnonzero(mask)
    documents = tokenized.take(chosen)
    assert documents.docs is not None, "provenance is made for all, and left out when train is written"
    hashes = text_hashes(texts.take(pa.array(chosen)), None if parts is None else parts[chosen])
    val.append(documents.tokens, documents.lengths, documents.docs.append_column(HASH_COLUMN, hashes))
    return tokenized.take(np.flatnonzero(~mask))
