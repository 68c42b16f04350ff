"""Tokenized documents on their way to a shard: in order, or shuffled within blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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

    def take(self, order: NDArray[np.int64]) -> Tokenized:
        """Return the documents in `order`, a list of their numbers."""
        lengths = self.lengths[order]
        starts = (np.cumsum(self.lengths) - self.lengths)[order]
        return Tokenized(
            tokens=_gather(self.tokens, starts, lengths),
            lengths=lengths,
            num_bytes=self.num_bytes[order],
            docs=None if self.docs is None else self.docs.take(pa.array(order)),
        )


def _gather(tokens: NDArray[np.uint32], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the stretches of `tokens` one behind the other: copied one by one where they are long, by index else."""
    total = int(lengths.sum())
    if total > LONG_DOCUMENT_TOKENS * len(lengths):
        return np.concatenate(
            [tokens[start : start + n] for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        )
    index = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    index += np.arange(total)
    return tokens[index]


def concatenate(parts: list[Tokenized]) -> Tokenized:
    """Return the documents of all parts, in order."""
    return Tokenized(
        tokens=np.concatenate([part.tokens for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        num_bytes=np.concatenate([part.num_bytes for part in parts]),
        docs=None if parts[0].docs is None else pa.concat_tables([part.docs for part in parts]),
    )


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
            block = concatenate(self._parts)
            self._parts, self._num_tokens = [], 0
            write(self._writer, block.take(random_order(f"{self._key}|{self._num_blocks}", len(block))))
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
