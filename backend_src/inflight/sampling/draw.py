"""The one random number of a sampled token: a pure function of (seed, sequence_index, position)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SEQUENCE_INDEX = 0
"""Each request has one sequence as long as num_return_sequences is 1."""

_TWO_TO_MINUS_53 = 2.0**-53

Words = npt.NDArray[np.uint64]
Draws = npt.NDArray[np.float64]

_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
"""Philox4x64's constants, and its number of rounds."""
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MANY = 96
"""Draws from which on all of them together take less time than one after the other."""


class CounterGenerator:
    """Uniform numbers addressed by where they are used instead of by how many came before.

    numpy's Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with key
    (seed, sequence_index) and counter (position, 0, 0, 0); of the 256 bits that this gives, the top
    53 of the first word are used. numpy keeps this stream the same on all machines and versions.

    Calls leave nothing behind that a later call could see. Not for use by two threads at once:
    one Philox is kept and re-addressed, which is four times faster than making one.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._key = np.zeros(2, dtype=np.uint64)
        self._counter = np.zeros(4, dtype=np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,  # all four words used up: the next one comes from the counter
            "has_uint32": 0,
            "uinteger": 0,
        }

    def uniform(self, seed: int, sequence_index: int, position: int) -> float:
        """A multiple of 2**-53 in [0, 1). Arguments are in [0, 2**64)."""
        self._key[0] = seed
        self._key[1] = sequence_index
        self._counter[0] = position
        self._philox.state = self._state
        return (int(self._philox.random_raw()) >> 11) * _TWO_TO_MINUS_53

    def uniforms(self, seeds: Words, sequence_index: int, positions: Words) -> Draws:
        """float64[n]: ``uniform`` of each of uint64[n] and uint64[n]; positions below 2**64 - 1."""
        if len(seeds) < _MANY:
            pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
            return np.array([self.uniform(seed, sequence_index, at) for seed, at in pairs])
        keys = np.stack((seeds, np.full_like(seeds, sequence_index)))
        words = _philox(keys, positions + np.uint64(1))  # numpy counts before it draws
        return (words >> np.uint64(11)) * _TWO_TO_MINUS_53


def _philox(keys: Words, counters: Words) -> Words:
    """uint64[n], the first words of Philox4x64 with uint64[2, n] keys and counters (c, 0, 0, 0)."""
    even = np.stack((counters, np.zeros_like(counters)))  # words 0 and 2
    odd = np.zeros_like(even)  # words 1 and 3
    for _ in range(_ROUNDS):
        high, low = _product(even)
        even, odd = high[::-1] ^ odd ^ keys, low[::-1]
        keys = keys + _KEY_STEPS
    first: Words = even[0]
    return first


def _product(words: Words) -> tuple[Words, Words]:
    """High and low halves of uint64[2, n] times _FACTORS: 128 bits, from products of 32 by 32."""
    low, high = words & _LOW, words >> _HALF
    factor_low, factor_high = _FACTORS & _LOW, _FACTORS >> _HALF
    crossed = low * factor_high
    middle = (low * factor_low >> _HALF) + (crossed & _LOW) + high * factor_low
    return high * factor_high + (crossed >> _HALF) + (middle >> _HALF), words * _FACTORS
