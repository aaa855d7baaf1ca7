"""SequenceSlots: who has which of the places that a device keeps for sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SequenceSlots:
    """A request keeps its slot until it is forgotten, or until others need it that run now: then
    those lose theirs that have not run for longest."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        """By request id; who ran last is at the end."""

    def take(self, request_ids: Sequence[int]) -> tuple[npt.NDArray[np.int32], list[int]]:
        """int32[R], a slot for each of R different requests, at most as many as there are slots;
        and the indices of those that have a new one."""
        assert len(request_ids) <= self._num_slots
        known = self._slots
        new = []
        for index, request_id in enumerate(request_ids):
            if request_id in known:
                known[request_id] = known.pop(request_id)
            else:
                new.append(index)
        for index in new:
            if not self._free:
                self._free.append(known.pop(next(iter(known))))
            known[request_ids[index]] = self._free.pop()
        return np.array([known[i] for i in request_ids], dtype=np.int32), new

    def give_back(self, request_id: int) -> None:
        """Of a request that has ended; one without a slot is ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
