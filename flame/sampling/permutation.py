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
_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 output of each 64-bit state, element-wise and modulo 2^64."""
    z = values + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def splitmix64_scalar(value: int) -> int:
    """Return the splitmix64 output of one state (an integer, taken modulo 2^64)."""
    z = (value + int(_GAMMA)) & _MASK
    z = ((z ^ (z >> 30)) * int(_MIX_1)) & _MASK
    z = ((z ^ (z >> 27)) * int(_MIX_2)) & _MASK
    return z ^ (z >> 31)


def round_keys(key: int) -> NDArray[np.uint64]:
    """Return the key of each round: the first outputs of a splitmix64 stream that starts at `key`."""
    states = np.array([(key + i * int(_GAMMA)) & _MASK for i in range(ROUNDS)], dtype=np.uint64)
    return splitmix64(states)


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return where the permutation of [0, size) with this `key` sends each index.

    `index` is 1-D with values in [0, size). Cost: about four network passes an index at worst on average, vectorised.
    """
    assert 1 <= size <= 1 << 62, "a permutation of 1 to 2^62 values"
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = round_keys(key)
    values = _network(index.astype(np.uint64), half_bits, mask, keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while len(outside):
        walked = _network(values[outside], half_bits, mask, keys)
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64)


def _network(
    values: NDArray[np.uint64], half_bits: np.uint64, mask: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << half_bits) | right


def epoch_key(data_seed: int, corpus_fingerprint: str, split: str, epoch: int) -> int:
    """Return the key of one epoch of one source: blake2b-64, little-endian, of `seed|fingerprint|split|epoch`."""
    text = f"{data_seed}|{corpus_fingerprint}|{split}|{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def epoch_offset(key: int, num_choices: int) -> int:
    """Return an epoch's first token, one of [0, num_choices), drawn from its key apart from the permutation."""
    drawn = splitmix64_scalar(key ^ 0x6F66667365740000)  # "offset": another stream than the rounds'
    return drawn * num_choices >> 64
