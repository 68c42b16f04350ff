"""A docs.parquet against its shard: its columns, every page of every row group, its rows and bytes of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flame.preprocess.problem import Problem
from flame.shards.manifest import ShardInfo
from flame.shards.provenance import PROVENANCE_FIELDS
from flame.words import counted


def check_docs(path: Path, shard: ShardInfo) -> Iterator[Problem]:
    """Yield what is wrong with it: all row groups are read, their pages' checksums compared.

    Memory: one row group, 64 MiB of rows at most.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for field in PROVENANCE_FIELDS:
                index = file.schema_arrow.get_field_index(field.name)
                if index < 0 or file.schema_arrow.field(index).type != field.type:
                    yield Problem(path=path, text=f"it has no column {field.name} of type {field.type}")
                    return
            yield from _check_rows(path, file, shard)
    except FileNotFoundError:
        yield Problem(path=path, text="a file of the corpus is absent")
    except (OSError, ValueError, pa.ArrowException) as error:
        size_bytes = path.stat().st_size if path.is_file() else None
        yield Problem(path=path, text=_unread(error), bytes=None if size_bytes is None else (0, size_bytes))


def _check_rows(path: Path, file: Any, shard: ShardInfo) -> Iterator[Problem]:
    num_bytes = num_rows = 0
    is_whole = True
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        first, num_rows = num_rows, num_rows + metadata.num_rows
        try:
            table = file.read_row_group(group)
            column = table.column("num_bytes").to_numpy()
        except (OSError, ValueError, pa.ArrowException) as error:
            is_whole = False
            text = f"rows {first} to {num_rows - 1}: {_unread(error)}"
            yield Problem(path=path, text=text, bytes=_bytes_of(metadata))
            continue
        if table.num_rows != metadata.num_rows:
            is_whole = False
            text = f"rows {first} to {num_rows - 1} are {table.num_rows} rows"
            yield Problem(path=path, text=text, bytes=_bytes_of(metadata))
        num_bytes += int(np.sum(column, dtype=np.int64))
    if num_rows != shard.num_documents:
        yield Problem(
            path=path,
            text=f"it has {counted(num_rows, 'row')}, and the shard {counted(shard.num_documents, 'document')}",
        )
    if is_whole and num_bytes != shard.num_bytes:
        yield Problem(path=path, text=f"its num_bytes sum to {num_bytes}, and the manifest says {shard.num_bytes}")


def _unread(error: Exception) -> str:
    return f"it cannot be read: {' '.join(str(error).split())}"


def _bytes_of(row_group: Any) -> tuple[int, int]:
    """Return the bytes of the file that hold a row group."""
    starts, stops = [], []
    for column in (row_group.column(index) for index in range(row_group.num_columns)):
        offsets = [column.data_page_offset]
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            offsets.append(column.dictionary_page_offset)
        starts.append(min(offsets))
        stops.append(min(offsets) + column.total_compressed_size)
    return min(starts), max(stops)
