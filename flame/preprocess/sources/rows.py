"""What a reader of another system's token files gives: rows of ids as they lie there, nothing judged yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Some consecutive rows of one file, a document each.

    `ids` are those of all rows, of any integer type, and `lengths` (int64) sum to them; a row that is `null` has none.
    `kept` are the kept columns or None; `progress_bytes` is what the rows count for in their piece's `num_bytes`;
    errors call a row by `noun`.
    """

    path: str
    first_row: int
    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    null: NDArray[np.bool_]
    kept: pa.Table | None
    progress_bytes: int
    noun: str = "row"
