"""Texts that were read one at a time, on their way to being documents."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from flame.preprocess.plan import COMPRESSION_RATIO, Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.stream import ByteStream
from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import BATCH_BYTES, BATCH_DOCUMENTS, Documents, make_documents, replace_surrogates


class StringBatch:
    """Candidates on their way to being `Documents`: a fixed number, so that a file's batches are always the same."""

    def __init__(self, piece: Piece, columns: Columns, stream: ByteStream) -> None:
        self.stream = stream
        self._piece = piece
        self._columns = columns
        self._consumed = self.stream.consumed
        self._clear()

    def _clear(self) -> None:
        self._rows: list[int] = []
        self._texts: list[str | None] = []
        self._kept: list[list[str | None]] = [[] for _ in self._columns.kept_names]
        self._characters = 0

    def add(self, row: int, text: str | None, kept: list[str | None]) -> None:
        self._rows.append(row)
        self._texts.append(text)
        self._characters += 0 if text is None else len(text)
        for values, value in zip(self._kept, kept, strict=True):
            values.append(value)

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= BATCH_DOCUMENTS or self._characters >= BATCH_BYTES

    def take(self, rejects: Rejects) -> Documents:
        """Return the candidates that are documents, and begin again."""
        texts = _string_array(self._texts, rejects)
        kept = None
        if self._kept:
            arrays = [_string_array(values, None).cast(pa.string()) for values in self._kept]
            kept = pa.table(arrays, schema=self._columns.kept)
        rows = np.array(self._rows, dtype=np.uint64)
        consumed = self.stream.consumed
        progress = (consumed - self._consumed) * (1 if self._piece.compression is None else COMPRESSION_RATIO)
        self._consumed = consumed
        self._clear()
        return make_documents(texts, rows, kept, rejects, path=self._piece.path, progress_bytes=progress)


def _string_array(values: list[str | None], rejects: Rejects | None) -> pa.LargeStringArray:
    try:
        return pa.array(values, pa.large_string())
    except UnicodeEncodeError:
        return pa.array([_encodable(value, rejects) for value in values], pa.large_string())


def _encodable(value: str | None, rejects: Rejects | None) -> str | None:
    if value is None or not any("\ud800" <= character <= "\udfff" for character in value):
        return value
    return replace_surrogates(value, rejects)
