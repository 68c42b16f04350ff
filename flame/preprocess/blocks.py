"""Tokenized documents on their way to a shard: in order, or shuffled within blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.preprocess.plan import random_order
from flame.preprocess.texts import Documents
from flame.shards.writer import SplitWriter

INTERLEAVED_PIECES = 8
LONG_DOCUMENT_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """Whole documents, BOS and EOS included: `tokens` uint32, `lengths` int64, `docs` and `num_bytes` an entry each."""

    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    docs: pa.Table | None

    def __len__(self) -> int:
        return len(self.lengths)

    def slice(self, start: int, stop: int) -> Tokenized:
        """Return documents [start, stop), without a copy."""
        first, last = int(self.lengths[:start].sum()), int(self.lengths[:stop].sum())
        return Tokenized(
            tokens=self.tokens[first:last],
            lengths=self.lengths[start:stop],
            num_bytes=self.num_bytes[start:stop],
            docs=None if self.docs is None else self.docs.slice(start, stop - start),
        )

    def split(self) -> list[NDArray[np.uint32]]:
        """Return each document's tokens, without a copy."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        return [self.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def take(self, order: NDArray[np.int64]) -> Tokenized:
        """Return the documents in `order`, a list of their numbers."""
        return take([self], order)


def take(parts: list[Tokenized], order: NDArray[np.int64]) -> Tokenized:
    """Return documents of all parts, counted through them, in `order`, a list of their numbers."""
    lengths = _joined([part.lengths for part in parts])
    ends, chosen = np.cumsum(lengths), lengths[order]
    if int(chosen.sum()) > LONG_DOCUMENT_TOKENS * len(order):  # copied one by one
        documents = [document for part in parts for document in part.split()]
        tokens = _joined([documents[index] for index in order.tolist()])
    else:  # token by token
        index = np.repeat((ends - lengths)[order] - (np.cumsum(chosen) - chosen), chosen)
        index += np.arange(len(index))
        tokens = _joined([part.tokens for part in parts])[index]
    docs = None if parts[0].docs is None else pa.concat_tables([part.docs for part in parts]).take(pa.array(order))
    return Tokenized(
        tokens=tokens, lengths=chosen, num_bytes=_joined([part.num_bytes for part in parts])[order], docs=docs
    )


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class BlockShuffler:
    """Passes documents to a writer, shuffled within blocks that end at the first document end past `block_tokens`.

    The order depends on the documents, their order and `key` only, never on how they were batched. Memory: a block,
    and its copy in the new order.
    """

    def __init__(self, writer: SplitWriter, *, block_tokens: int, key: str) -> None:
        self._writer = writer
        self._block_tokens = block_tokens
        self._key = key
        self._parts: list[Tokenized] = []
        self._num_tokens = 0
        self._num_blocks = 0

    def append(self, documents: Tokenized) -> None:
        while len(documents):
            ends = np.cumsum(documents.lengths)
            stop = int(np.searchsorted(ends, self._block_tokens - self._num_tokens)) + 1
            part = documents.slice(0, min(stop, len(documents)))
            self._parts.append(part)
            self._num_tokens += len(part.tokens)
            if self._num_tokens >= self._block_tokens:
                self.flush()
            documents = documents.slice(len(part), len(documents))

    def flush(self) -> None:
        """Write the block as it stands."""
        if self._parts:
            order = random_order(f"{self._key}|{self._num_blocks}", sum(map(len, self._parts)))
            block = take(self._parts, order)
            self._parts, self._num_tokens = [], 0
            write(self._writer, block)
            self._num_blocks += 1


def write(writer: SplitWriter, documents: Tokenized) -> None:
    """Append documents to a split."""
    if documents.docs is not None:
        writer.append(documents.tokens, documents.lengths, documents.docs)
    else:
        writer.append(documents.tokens, documents.lengths, num_bytes=documents.num_bytes)


def interleave(pieces: Iterable[Iterator[Documents]], width: int) -> Iterator[Documents]:
    """Yield the batches of `width` pieces in turn; a finished piece makes room for the next one."""
    waiting = iter(pieces)
    places: list[Iterator[Documents]] = []
    while True:
        while len(places) < width and (piece := next(waiting, None)) is not None:
            places.append(piece)
        if not places:
            return
        for piece in list(places):
            batch = next(piece, None)
            if batch is None:
                places.remove(piece)
            else:
                yield batch
