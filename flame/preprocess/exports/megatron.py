"""An index of Megatron-LM and megatron-core, NAME.idx beside NAME.bin; sources/megatron.py tells its bytes."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from flame.errors import CorpusError
from flame.preprocess.exports.boundaries import bounds_of
from flame.preprocess.sources.megatron import DTYPE_CODES, HEADER, LENGTH, MAGIC, POINTER, VERSION
from flame.shards.reader import Split

DTYPES = ("uint16", "int32")  # those that Megatron itself chooses from; it has no uint32
_AT_ONCE = 2**20


def write_index(file: BinaryIO, split: Split, dtype: str) -> None:
    """Write the index of a split, a document one sequence. Cost: the document ends are read twice."""
    (code,) = (code for code, name in DTYPE_CODES.items() if name == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, split.num_documents, split.num_documents + 1))
    document = 0
    for starts, ends in bounds_of(split):
        lengths = ends - starts
        if lengths.max() > np.iinfo(LENGTH).max:
            raise CorpusError(
                "a document is longer than Megatron's index can tell",
                where=f"{split.corpus.path}, split {split.name}, document {document + int(lengths.argmax())}",
                got=f"{lengths.max()} tokens",
                expected=f"at most {np.iinfo(LENGTH).max}",
            )
        file.write(lengths.astype(LENGTH).tobytes())
        document += len(lengths)
    for starts, _ in bounds_of(split):
        file.write((starts * np.dtype(dtype).itemsize).astype(POINTER).tobytes())
    for start in range(0, split.num_documents + 1, _AT_ONCE):
        file.write(np.arange(start, min(start + _AT_ONCE, split.num_documents + 1), dtype=POINTER).tobytes())
