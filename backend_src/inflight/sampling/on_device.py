"""DeviceSampling: what a device that samples is told of an iteration's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.batch.device_sampling import RowLists, SamplingInputs, SamplingRoom
from inflight.batch.llm_request import LlmRequest
from inflight.sampling.edits import LogitEdits
from inflight.sampling.slots import SequenceSlots


class DeviceSampling:
    """Adds lists and slots to the rules of an iteration's rows.

    Ids of a sequence with penalties are counted on the device, which is sent those that came since.
    A row whose lists do not fit into what is left of the room is left to the host, in this
    iteration.
    """

    def __init__(self, room: SamplingRoom, *, normalize_log_probs: bool) -> None:
        self._normalize_log_probs = normalize_log_probs
        self._room = room
        self._owners = SequenceSlots(room.num_slots)
        self._num_counted = np.zeros(room.num_slots, dtype=np.int64)
        """Tokens of the sequence in each slot that the device has counted."""

    def remove(self, request_id: int) -> None:
        """Forgets a request; one without a slot is ignored."""
        self._owners.give_back(request_id)

    def inputs(
        self,
        requests: Sequence[LlmRequest],
        rules: npt.NDArray[Any],
        edits: Sequence[LogitEdits | None],
    ) -> SamplingInputs:
        """Of rows as they are now, at most as many as there are slots: their RULES, and their
        edits, None where a row has none.

        What is listed to be counted is taken as counted from then on: a forward that fails is the
        end of its requests.
        """
        slots, new = self._owners.take([request.request_id for request in requests])
        self._num_counted[slots[new]] = 0
        lists = _Lists(len(requests), self._room.num_listed)
        for index, edit in enumerate(edits):
            if edit is not None:
                self._list(lists, index, int(slots[index]), requests[index], edit)
        return SamplingInputs(
            temperatures=rules["temperature"].astype(np.float32),
            top_ks=rules["top_k"],
            top_ps=rules["top_p"],
            min_p_offsets=rules["min_p_offset"],
            uniforms=rules["uniform"],
            repetition_penalties=rules["repetition_penalty"],
            presence_penalties=rules["presence_penalty"],
            frequency_penalties=rules["frequency_penalty"],
            wants_log_prob=rules["wants_log_prob"],
            is_left=lists.is_left,
            slots=slots,
            fresh_slots=np.array(lists.fresh_slots, dtype=np.int32),
            counted=lists.counted.end_to_end(),
            biased=lists.biased.end_to_end(),
            biases=_joined(lists.biases, np.float32),
            masked=lists.masked.end_to_end(),
            normalize_log_probs=self._normalize_log_probs,
        )

    def _list(
        self, lists: _Lists, index: int, slot: int, request: LlmRequest, edit: LogitEdits
    ) -> None:
        """The lists of one row, all of them or none."""
        masked = edit.masked_after(request)
        num_counted = self._num_counted.item(slot)
        num_new = request.num_tokens - num_counted if edit.has_penalties else 0
        if not lists.take_room(len(edit.bias_ids) + len(masked) + num_new):
            lists.is_left[index] = 1
            return
        if len(edit.bias_ids):
            lists.biased.put(index, edit.bias_ids)
            lists.biases.append(edit.biases)
        if masked:
            lists.masked.put(index, masked)
        if num_new:
            lists.counted.put(index, request.token_ids[num_counted:])
            if num_counted == 0:
                lists.fresh_slots.append(slot)
            self._num_counted[slot] = request.num_tokens


class _Lists:
    """Of the rows of an iteration, as far as there is room."""

    def __init__(self, num_rows: int, room: int) -> None:
        self.is_left = np.zeros(num_rows, dtype=np.int32)
        self.fresh_slots: list[int] = []
        self.counted, self.masked, self.biased = (_RowIds(num_rows) for _ in range(3))
        self.biases: list[npt.NDArray[np.float32]] = []
        self._room = room

    def take_room(self, num_ids: int) -> bool:
        """False, and nothing is taken, where there is not so much left."""
        if num_ids > self._room:
            return False
        self._room -= num_ids
        return True


class _RowIds:
    """A list of ids for each row, put in the order of rows."""

    def __init__(self, num_rows: int) -> None:
        self._lengths = np.zeros(num_rows, dtype=np.int32)
        self._ids: list[npt.ArrayLike] = []

    def put(self, row: int, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        self._lengths[row] = len(ids)
        self._ids.append(ids)

    def end_to_end(self) -> RowLists:
        starts = np.zeros(len(self._lengths) + 1, dtype=np.int32)
        np.cumsum(self._lengths, out=starts[1:])
        return RowLists(starts=starts, ids=_joined(self._ids, np.int32))


def _joined(parts: Sequence[npt.ArrayLike], dtype: Any) -> npt.NDArray[Any]:
    """A copy: what the parts lie in may change before it is used."""
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.empty(0, dtype)
