"""How an iteration's rows are sampled, behind its other metadata in the same buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.batch.device_sampling import SamplingInputs, SamplingRoom

ALIGNMENT = 32
"""Numbers of 4 bytes; sections begin at multiples of it."""

_PER_ROW = 19
"""Numbers of a row that are in no list, those of 8 bytes counted twice; there are fewer."""
_SECTIONS = 20


class Section(NamedTuple):
    """Where in the buffer, in numbers of 4 bytes."""

    start: int
    stop: int
    dtype: str
    """"int32", "float32" or "float64"."""


def sampling_size(room: SamplingRoom) -> int:
    """Numbers that any iteration's sections take at most, wherever they begin."""
    listed = 2 * room.num_listed + room.num_slots  # a bias is an id and a number
    return _PER_ROW * room.num_slots + listed + (_SECTIONS + 1) * ALIGNMENT


def stage_sampling(
    buffer: npt.NDArray[np.int32], start: int, inputs: SamplingInputs
) -> dict[str, Section]:
    """Puts everything of ``inputs`` into int32 ``buffer`` from ``start`` on, in sections named as
    in ``kernels.sampling_rows.SamplingRows``."""
    sections, end = {}, start
    for name, values in _arrays_of(inputs).items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        numbers = np.ascontiguousarray(values).view(np.int32)
        end = begin + len(numbers)
        buffer[begin:end] = numbers
        sections[name] = Section(begin, end, values.dtype.name)
    assert len(sections) <= _SECTIONS
    return sections


def end_of(sections: Mapping[str, Section]) -> int:
    return max(section.stop for section in sections.values())


def _arrays_of(inputs: SamplingInputs) -> dict[str, npt.NDArray[Any]]:
    return {
        "temperatures": inputs.temperatures,
        "top_ks": inputs.top_ks,
        "top_ps": inputs.top_ps,
        "min_p_offsets": inputs.min_p_offsets,
        "uniforms": inputs.uniforms,
        "wants_log_prob": inputs.wants_log_prob,
        "is_left": inputs.is_left,
        "bias_starts": inputs.biased.starts,
        "bias_ids": inputs.biased.ids,
        "biases": inputs.biases,
        "masked_starts": inputs.masked.starts,
        "masked_ids": inputs.masked.ids,
        "repetition_penalties": inputs.repetition_penalties,
        "presence_penalties": inputs.presence_penalties,
        "frequency_penalties": inputs.frequency_penalties,
        "slots": inputs.slots,
        "fresh_slots": inputs.fresh_slots,
        "counted_starts": inputs.counted.starts,
        "counted_ids": inputs.counted.ids,
    }
