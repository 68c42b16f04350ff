"""What every task of a build or a conversion is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from flame.preprocess.holdout import HASH_COLUMN, HASH_TYPE
from flame.preprocess.readers.columns import Columns
from flame.shards.writer import PROVENANCE_FIELDS


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What decides a task's bytes, beside its pieces. `shuffle_seed` None keeps the input's order.

    `shuffle_block_tokens`, `shard_tokens` and `max_tokens` count tokens, `min_chars` and `max_chars` Unicode
    characters of a text, `batch_size` documents given to the tokenizer at once.
    """

    corpus: Path
    plan_digest: str
    columns: Columns
    provenance: bool
    eos_id: int
    bos_id: int | None
    batch_size: int
    shuffle_seed: int | None
    shuffle_block_tokens: int
    shard_tokens: int
    val_fraction: float
    on_error: str
    min_chars: int | None = None
    max_chars: int | None = None
    dedup: bool = False
    max_tokens: int | None = None
    long_documents: str = "skip"

    @property
    def docs_schema(self) -> pa.Schema | None:
        return docs_schema(self.columns) if self.provenance else None

    @property
    def val_schema(self) -> pa.Schema:
        """The schema of held-out documents until sealing: their size and hash whether or not provenance is kept."""
        return pa.schema([*PROVENANCE_FIELDS, *self.columns.kept, pa.field(HASH_COLUMN, HASH_TYPE)])


def docs_schema(columns: Columns) -> pa.Schema:
    """Return the schema of docs.parquet."""
    return pa.schema([*PROVENANCE_FIELDS, *columns.kept])
