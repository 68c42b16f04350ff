"""What datatrove keeps beside NAME.ds: NAME.ds.index and NAME.ds.metadata; sources/datatrove.py tells their bytes."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from flame.preprocess.exports.boundaries import bounds_of
from flame.preprocess.sources.datatrove import END
from flame.shards.reader import Split

DTYPES = ("uint16", "uint32")


def write_index(file: BinaryIO, split: Split, dtype: str) -> None:
    """Write the document ends of a split."""
    for _, ends in bounds_of(split):
        file.write(ends.astype(END).tobytes())


def write_metadata(file: BinaryIO, split: Split, dtype: str) -> None:
    """Write the tokenizer's place, the width of an id and the number of tokens; the last line is for people."""
    tokenizer = (split.corpus.tokenizer_folder / "tokenizer.json").absolute()
    lines = (
        f"{tokenizer}|{np.dtype(dtype).itemsize}",
        f"{split.num_tokens}",
        f"{split.num_tokens:,} tokens of {split.num_documents:,} documents",
    )
    file.write("\n".join(lines).encode("utf-8", "surrogateescape"))
