"""How rows are sampled, in the buffer that carries an iteration's metadata to the device."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import pytest

from inflight.batch.device_sampling import RowLists, SamplingInputs
from inflight.model.device.sizing import every_rule
from inflight.model.device.staged_sampling import (
    ALIGNMENT,
    Section,
    end_of,
    sampling_size,
    stage_sampling,
)
from inflight.model.device.staging import RowLayout, StagedRows
from tests.unit.model.test_device_staging import GENERATIONS, LIMITS, MIXED, SCRATCH

ROOM = LIMITS.sampling_room


def fullest(num_rows: int) -> SamplingInputs:
    """Lists that take all the room: as many biases as there may be ids."""
    lists = RowLists(
        starts=np.arange(num_rows + 1, dtype=np.int32),
        ids=np.arange(ROOM.num_listed, dtype=np.int32),
    )
    biases = np.linspace(0, 1, ROOM.num_listed, dtype=np.float32)
    none = RowLists(starts=lists.starts, ids=lists.ids[:0])
    inputs = every_rule(num_rows, 50)
    return replace(inputs, biased=lists, biases=biases, counted=none, masked=none)


def values_of(
    buffer: npt.NDArray[np.int32], section: Section
) -> npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.float64]:
    return buffer[section.start : section.stop].view(section.dtype)


@pytest.mark.parametrize("start", [0, 1, 70])
def test_every_section_holds_what_was_put_there(start: int) -> None:
    inputs = replace(fullest(3), uniforms=np.array([0.1, 1 / 3, 1 - 2**-53]))
    buffer = np.full(start + sampling_size(ROOM), -7, dtype=np.int32)
    sections = stage_sampling(buffer, start, inputs)
    ends = sorted(sections.values())
    assert all(a.stop <= b.start for a, b in zip(ends, ends[1:], strict=False))
    assert all(section.start % ALIGNMENT == 0 for section in ends) and ends[0].start >= start
    listed = {
        "bias_starts": inputs.biased.starts, "bias_ids": inputs.biased.ids,
        "masked_starts": inputs.masked.starts, "masked_ids": inputs.masked.ids,
        "counted_starts": inputs.counted.starts, "counted_ids": inputs.counted.ids,
    }  # fmt: skip
    of_rows = {f.name for f in fields(SamplingInputs)} & sections.keys()
    assert sections.keys() == listed.keys() | of_rows and len(of_rows) == 13
    for name, section in sections.items():
        wanted = listed[name] if name in listed else getattr(inputs, name)
        np.testing.assert_array_equal(values_of(buffer, section), wanted)
        assert section.dtype == wanted.dtype.name
    assert (buffer[end_of(sections) :] == -7).all() and (buffer[:start] == -7).all()


def test_the_fullest_iteration_fits_behind_its_tables() -> None:
    rows = StagedRows(LIMITS, np.empty(RowLayout.of(LIMITS).size, dtype=np.int32))
    inputs = replace(GENERATIONS, sampling=fullest(LIMITS.max_batch_size))
    used = rows.fill_generations(inputs, LIMITS.max_batch_size, SCRATCH)
    assert rows.layout.used(LIMITS.max_batch_size) < used <= rows.layout.size
    assert used == end_of(rows.sampling)


def test_a_fill_without_sampling_has_no_sections() -> None:
    rows = StagedRows(LIMITS, np.empty(RowLayout.of(LIMITS).size, dtype=np.int32))
    rows.fill(replace(MIXED, sampling=every_rule(2, 50)))
    assert rows.sampling["slots"].start >= rows.layout.used(2)
    used = rows.fill(MIXED)
    assert not rows.sampling and used == rows.layout.used(2)
