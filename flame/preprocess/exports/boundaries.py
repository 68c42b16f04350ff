"""Where the documents of a split begin and end, some at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flame.shards.reader import Split

STRETCH_TOKENS = 2**24


def bounds_of(split: Split) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (starts, ends) of the documents of the split in order, in tokens, those that end in a stretch at a time."""
    begin = 0
    for start in range(0, split.num_tokens, STRETCH_TOKENS):
        ends = split.ends_between(start, min(start + STRETCH_TOKENS, split.num_tokens))
        if len(ends):
            yield np.concatenate(([begin], ends[:-1])), ends
            begin = int(ends[-1])
