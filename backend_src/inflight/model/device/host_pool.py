"""HostPool: room in the host's memory for offloaded blocks, from where the device copies itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.native.kv_storage import untouched_memory


class HostPool:
    """Places of one size. A place is free again when the last array that shows it is gone, on
    whatever thread that happens."""

    def __init__(
        self, num_places: int, place_bytes: int, register: Callable[[Tensor], bool]
    ) -> None:
        """At least one place. ``register``: of the DeviceRuntime. Raises MemoryError where there is
        no room for the addresses."""
        self._buffer = untouched_memory((num_places, place_bytes), torch.uint8)
        self.pinned_bytes = self._buffer.nbytes if register(self._buffer) else 0
        """Which the device reaches by itself: all of it, or none."""
        self._free = list(range(num_places))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> npt.NDArray[np.uint8] | None:
        """uint8[place_bytes], with whatever it held before; None: every place is in use."""
        try:
            place = self._free.pop()
        except IndexError:
            return None
        array: npt.NDArray[np.uint8] = self._buffer[place].numpy()
        # Views of the array keep it alive, and with it the place.
        weakref.finalize(array, self._free.append, place).atexit = False
        return array
