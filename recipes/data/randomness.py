"""Random numbers by counter, and permutations without a table. numpy only.

Everything random about data is a pure function of a key and a counter, so any rank can compute any sample of any
epoch alone, in any order, and get the same bits. numpy's generators promise no such stability between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele, Lea, Flood 2014)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_ROUNDS = 8  # four make a Feistel network a good mixer; halves of a few bits need more


def key_of(*parts: int | str) -> int:
    """A 64-bit key from what the numbers are for, e.g. ``key_of("mask", seed, epoch)``."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def random_bits(keys: UInt64s | int, counters: UInt64s) -> UInt64s:
    """Number ``counters[i]`` of the random sequence of each key; broadcasts, wraps modulo 2**64."""
    z = np.atleast_1d(np.asarray(keys, dtype=np.uint64)) + (np.atleast_1d(counters) + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLY_1
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLY_2
    return z ^ (z >> np.uint64(31))


def random_table(key: int, rows: UInt64s, columns: int) -> UInt64s:
    """Random bits [len(rows), columns]; a row's numbers depend on the key and on ``rows[i]`` alone."""
    row_keys = random_bits(key, rows)[:, None]
    return random_bits(row_keys, np.arange(columns, dtype=np.uint64)[None, :])


def as_uniform(bits: UInt64s) -> NDArray[np.float64]:
    """Random bits as numbers in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """A random permutation of [0, size) that costs no memory: a Feistel network with cycle walking.

    The network permutes [0, 4**h), the smallest such range that holds ``size``; a value that falls outside is sent
    through again until it lands inside, which keeps the whole a permutation of [0, size).
    """

    def __init__(self, size: int, key: int) -> None:
        assert size >= 1
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._size = np.uint64(size)
        self._half_bits = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)
        self._round_keys = [key_of("feistel", key, number) for number in range(_ROUNDS)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each position (in [0, size)) goes."""
        values = self._network(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self._size)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self._size]
        return values.astype(np.int64)

    def _network(self, values: UInt64s) -> UInt64s:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (random_bits(key, right) & self._half_mask)
        return (left << self._half_bits) | right
