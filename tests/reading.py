"""What readers find in a file that is planned and cut as a build does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from flame.preprocess.file_kinds import classify
from flame.preprocess.plan import InputFile, Piece, cut_file
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.readers.tables import TABLES
from flame.preprocess.rejects import Rejects

TEXT = Columns(text="text", kept=pa.schema([]))


def input_file(path: Path) -> InputFile:
    found = classify(str(path))
    status = path.stat()
    groups = TABLES[found.format](str(path), None, "text").groups if found.format in ("parquet", "arrow") else ()
    return InputFile(
        path=found.path,
        format=found.format,
        compression=found.compression,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        groups=groups,
    )


def pieces_of(path: Path, piece_bytes: int = 2**25) -> list[Piece]:
    return cut_file(input_file(path), piece_bytes)


def read(
    path: Path, *, on_error: str = "fail", piece_bytes: int = 2**25, columns: Columns = TEXT
) -> tuple[list[str], list[int], Rejects]:
    rejects = Rejects(on_error=on_error)
    batches = [b for piece in pieces_of(path, piece_bytes) for b in read_piece(piece, columns, rejects)]
    texts = [text for batch in batches for text in batch.texts.to_pylist()]
    assert [size for batch in batches for size in batch.num_bytes.tolist()] == [len(t.encode()) for t in texts]
    return texts, [row for batch in batches for row in batch.rows.tolist()], rejects


def jsonl(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)
