"""A random permutation of [0, n) as a function: no table, no state, any n up to 2^62.

A balanced Feistel network over the smallest even number of bits that holds n, with six rounds of splitmix64, walked
along its cycle until it lands below n. Sources: Luby & Rackoff 1988 (Feistel permutations), Black & Rogaway 2002 (cycle
walking), Steele, Lea & Flood 2014 (splitmix64).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
MAX_SIZE = 1 << 62
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_OFFSET_STREAM = 0x6F66667365740000  # "offset": another stream than the rounds'


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 output of each 64-bit state, element-wise and modulo 2^64."""
    z = values + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def splitmix64_scalar(value: int) -> int:
    """Return the splitmix64 output of one state (an integer, taken modulo 2^64)."""
    z = (value + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def half_bits(size: int) -> int:
    """Return the bits of each half of the network that permutes [0, size)."""
    assert 1 <= size <= MAX_SIZE, "a permutation of 1 to 2^62 values"
    return max(1, ((size - 1).bit_length() + 1) // 2)


def round_keys(key: int) -> tuple[int, ...]:
    """Return the key of each round: the first outputs of a splitmix64 stream that starts at `key`."""
    return tuple(splitmix64_scalar(key + i * _GAMMA) for i in range(ROUNDS))


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return where the permutation of [0, size) with this `key` sends each index.

    `index` is 1-D with values in [0, size). Cost: at most four passes of the network an index on average, vectorised.
    """
    keys = np.array(round_keys(key), dtype=np.uint64)[:, None]
    return permute_each(index, np.array([size]), np.array([half_bits(size)]), keys)


def permute_each(
    index: NDArray[np.int64], sizes: NDArray[np.int64], halves: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return where each index is sent by a permutation of its own: one pass for all, whatever they belong to.

    `index`, `sizes` and `halves` (of `half_bits`) are `[n]`, `keys` (of `round_keys`) `[ROUNDS, n]`; or 1 for n where
    it is the same for all.
    """
    n = len(index)
    limits, bits = (np.broadcast_to(values.astype(np.uint64), n) for values in (sizes, halves))
    keys = np.broadcast_to(keys, (ROUNDS, n))
    values = _network(index.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= limits)
    while len(outside):
        walked = _network(values[outside], bits[outside], keys[:, outside])
        values[outside] = walked
        outside = outside[walked >= limits[outside]]
    return values.astype(np.int64)


def unpermute_each(
    values: NDArray[np.int64], sizes: NDArray[np.int64], halves: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the index that `permute_each` sends to each of `values`: its inverse, of the same shapes and cost."""
    n = len(values)
    limits, bits = (np.broadcast_to(given.astype(np.uint64), n) for given in (sizes, halves))
    keys = np.broadcast_to(keys, (ROUNDS, n))
    index: NDArray[np.uint64] = _network_back(values.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(index >= limits)
    while len(outside):
        walked = _network_back(index[outside], bits[outside], keys[:, outside])
        index[outside] = walked
        outside = outside[walked >= limits[outside]]
    return index.astype(np.int64)


def _network(values: NDArray[np.uint64], bits: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << bits) - np.uint64(1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << bits) | right


def _network_back(values: NDArray[np.uint64], bits: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << bits) - np.uint64(1)
    left, right = values >> bits, values & mask
    for i in reversed(range(ROUNDS)):
        mixed: NDArray[np.uint64] = splitmix64(left ^ keys[i]) & mask
        left, right = right ^ mixed, left
    return (left << bits) | right


def epoch_key(data_seed: int, corpus_fingerprint: str, split: str, epoch: int) -> int:
    """Return the key of one epoch of one source: blake2b-64, little-endian, of `seed|fingerprint|split|epoch`."""
    text = f"{data_seed}|{corpus_fingerprint}|{split}|{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def epoch_offset(key: int, num_choices: int) -> int:
    """Return an epoch's first token, one of [0, num_choices), drawn from its key apart from the permutation."""
    return splitmix64_scalar(key ^ _OFFSET_STREAM) * num_choices >> 64
