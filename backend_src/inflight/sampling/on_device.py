"""DeviceSampling: what a device that samples is told of an iteration's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.batch.device_sampling import RowLists, SamplingInputs, SamplingRoom
from inflight.batch.llm_request import LlmRequest
from inflight.sampling.draw import SEQUENCE_INDEX, CounterGenerator
from inflight.sampling.edits import LogitEdits
from inflight.sampling.slots import SequenceSlots

LEAST_TEMPERATURE = 1e-30
"""Cold enough to tell any two logits apart; anything much colder is 0 in float32."""

_NUMBERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p_offset", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("wants_log_prob", np.int32),
        ("seed", np.uint64),
        ("num_counted", np.int64),  # tokens of the sequence that the device has counted
    ]
)
"""What is kept of the request in a slot; the names are those of SamplingInputs."""


class DeviceSampling:
    """The rules of requests as numbers, in an array by slot that is written when a request takes
    its slot; an iteration picks its rows out of it.

    Ids of a sequence with penalties are counted on the device, which is sent those that came since.
    A row whose lists do not fit into what is left of the room is left to the host, in this
    iteration.
    """

    def __init__(self, room: SamplingRoom, *, vocab_size: int, normalize_log_probs: bool) -> None:
        self._normalize_log_probs = normalize_log_probs
        self._room = room
        self._vocab_size = vocab_size
        self._owners = SequenceSlots(room.num_slots)
        self._kept = np.zeros(room.num_slots, dtype=_NUMBERS)
        self._num_counted = self._kept["num_counted"]
        self._generator = CounterGenerator()

    def remove(self, request_id: int) -> None:
        """Forgets a request; one without a slot is ignored."""
        self._owners.give_back(request_id)

    def inputs(
        self, requests: Sequence[LlmRequest], edits: Sequence[LogitEdits | None]
    ) -> SamplingInputs:
        """Of rows as they are now, at most as many as there are slots; None: the row has no edits.

        What is listed to be counted is taken as counted from then on: a forward that fails is the
        end of its requests.
        """
        slots, new = self._owners.take([request.request_id for request in requests])
        for index in new:
            self._kept[slots[index]] = _numbers_of(requests[index], self._vocab_size)
        lists = _Lists(len(requests), self._room.num_listed)
        for index, edit in enumerate(edits):
            if edit is not None:
                self._list(lists, index, int(slots[index]), requests[index], edit)
        rows = self._kept[slots]
        return SamplingInputs(
            temperatures=rows["temperature"],
            top_ks=rows["top_k"],
            top_ps=rows["top_p"],
            min_p_offsets=rows["min_p_offset"],
            uniforms=self._draws(rows, requests),
            repetition_penalties=rows["repetition_penalty"],
            presence_penalties=rows["presence_penalty"],
            frequency_penalties=rows["frequency_penalty"],
            wants_log_prob=rows["wants_log_prob"],
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

    def _draws(
        self, rows: npt.NDArray[Any], requests: Sequence[LlmRequest]
    ) -> npt.NDArray[np.float64]:
        draws = np.zeros(len(rows))
        drawn = np.flatnonzero(rows["temperature"])
        positions = np.array([requests[i].num_tokens for i in drawn], dtype=np.uint64)
        draws[drawn] = self._generator.uniforms(rows["seed"][drawn], SEQUENCE_INDEX, positions)
        return draws


def _numbers_of(request: LlmRequest, vocab_size: int) -> tuple[float, ...]:
    """In the order of ``_NUMBERS``."""
    config = request.request.sampling_config
    temperature = 1.0 if config.temperature is None else config.temperature
    temperature = max(temperature, LEAST_TEMPERATURE)
    return (
        0.0 if config.is_greedy else temperature,
        min(config.top_k or vocab_size, vocab_size),
        config.top_p or 1.0,
        # p >= min_p * p_max, in logits
        temperature * math.log(config.min_p) if config.min_p else -math.inf,
        config.repetition_penalty,
        config.presence_penalty,
        config.frequency_penalty,
        int(request.request.output_config.return_log_probs),
        request.seed,
        0,
    )


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
