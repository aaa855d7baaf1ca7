"""The one random number of a sampled token: a pure function of (seed, sequence_index, position)."""

from __future__ import annotations

from typing import Any

import numpy as np

_TWO_TO_MINUS_53 = 2.0**-53


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
