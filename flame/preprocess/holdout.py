"""Which documents are held out: a function of the text alone, so that a text is never on both sides."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from flame.preprocess.texts import text_data, text_hash, text_offsets

HASH_COLUMN = "text_hash"
HASH_TYPE = pa.binary(16)


def held_out(texts: pa.LargeStringArray, val_fraction: float) -> NDArray[np.bool_]:
    """Return which texts belong to `val`: those with xxh3_64(text) / 2^64 < val_fraction, in exact arithmetic."""
    threshold = math.ceil(Fraction(val_fraction) * 2**64)  # hashes are whole: h < t if and only if h < ⌈t⌉
    data, offsets = text_data(texts), text_offsets(texts).tolist()
    hashes = (text_hash(data[start:stop]) for start, stop in itertools.pairwise(offsets))
    return np.fromiter((value < threshold for value in hashes), dtype=bool, count=len(texts))


def text_hashes(texts: pa.LargeStringArray, parts: NDArray[np.int64] | None = None) -> pa.Array:
    """Return the xxh3-128 of each text: equal texts are told by it when copies are dropped.

    `parts` numbers those that were cut out of one text: the hash of all but the first of them takes the number in.
    """
    data, offsets = text_data(texts), text_offsets(texts).tolist()
    digests = [xxhash.xxh3_128_digest(data[a:b]) for a, b in itertools.pairwise(offsets)]
    for index, part in enumerate([] if parts is None else parts.tolist()):
        if part > 0:
            digests[index] = xxhash.xxh3_128_digest(digests[index] + part.to_bytes(8, "little"))
    return pa.array(digests, HASH_TYPE)


def first_copies(hashes: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return which entries are the first with their hash."""
    values = np.frombuffer(b"".join(hashes.to_pylist()), dtype="V16")
    _, first = np.unique(values, return_index=True)
    keep = np.zeros(len(values), dtype=bool)
    keep[first] = True
    return keep
