"""The one buffer that carries an iteration's metadata to the device, and its padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from inflight.model.device.staged_sampling import ALIGNMENT, sampling_size
from inflight.model.device.staging import RowLayout, RowLimits, StagedRows
from inflight.model.runner import PackedInputs

LIMITS = RowLimits(
    max_num_tokens=40, max_batch_size=6, max_blocks_per_sequence=3, tokens_per_block=16
)
SCRATCH = 9
MIXED = PackedInputs(
    token_ids=np.array([5, 6, 7, 8]),
    position_ids=np.array([16, 17, 18, 3]),
    slot_mapping=np.array([64, 65, 66, 35]),
    cu_seqlens_q=np.array([0, 3, 4], dtype=np.int32),
    context_lens=np.array([19, 4], dtype=np.int32),
    block_tables=np.array([[1, 4], [2, 7]], dtype=np.int32),
    logits_indices=np.array([2, 3]),
    num_context_sequences=1,
    num_context_tokens=3,
)
GENERATIONS = PackedInputs(
    token_ids=np.array([5, 6, 7]),
    position_ids=np.array([16, 0, 3]),
    slot_mapping=np.array([64, 80, 35]),
    cu_seqlens_q=np.array([0, 1, 2, 3], dtype=np.int32),
    context_lens=np.array([17, 1, 4], dtype=np.int32),
    block_tables=np.array([[1, 4], [5, 0], [2, 7]], dtype=np.int32),
    logits_indices=np.array([0, 1, 2]),
    num_context_sequences=0,
    num_context_tokens=0,
)


def staged() -> StagedRows:
    """Full of what no iteration has put there."""
    rows = StagedRows(LIMITS, np.empty(RowLayout.of(LIMITS).size, dtype=np.int32))
    rows.buffer[:] = -7
    return rows


def section(rows: StagedRows, name: str, count: int) -> npt.NDArray[np.int32]:
    start = getattr(rows.layout, name)
    return rows.buffer[start : start + count]


def tables(rows: StagedRows, count: int) -> npt.NDArray[np.int32]:
    return section(rows, "block_tables", count * 3).reshape(count, 3)


def test_sections_are_aligned_and_do_not_overlap() -> None:
    layout = RowLayout.of(LIMITS)
    sizes = {
        "token_ids": 40, "position_ids": 40, "slot_mapping": 40, "logits_indices": 40,
        "cu_seqlens_q": 7, "context_lens": 6, "block_tables": 18,
    }  # fmt: skip
    taken = np.zeros(layout.size, dtype=int)
    for name, size in sizes.items():
        start = getattr(layout, name)
        assert start % ALIGNMENT == 0
        taken[start : start + size] += 1
    assert taken.max() == 1
    room = sampling_size(LIMITS.sampling_room)
    assert layout.used(6) + room == layout.size and layout.used(2) == layout.block_tables + 6


def test_rows_are_taken_as_they_are() -> None:
    rows = staged()
    used = rows.fill(MIXED)
    for name in ("token_ids", "position_ids", "slot_mapping", "cu_seqlens_q", "context_lens",
                 "logits_indices"):  # fmt: skip
        expected = getattr(MIXED, name)
        np.testing.assert_array_equal(section(rows, name, len(expected)), expected)
    np.testing.assert_array_equal(tables(rows, 2)[:, :2], MIXED.block_tables)
    assert used == rows.layout.block_tables + 2 * 3
    assert (rows.buffer[used:] == -7).all()


@pytest.mark.parametrize("bucket", [3, 4, 6])
def test_generations_are_filled_up_with_rows_of_the_scratch_block(bucket: int) -> None:
    rows = staged()
    used = rows.fill_generations(GENERATIONS, bucket, SCRATCH)
    padding = bucket - 3
    assert section(rows, "token_ids", bucket).tolist() == [5, 6, 7] + [0] * padding
    assert section(rows, "position_ids", bucket).tolist() == [16, 0, 3] + [0] * padding
    assert section(rows, "slot_mapping", bucket).tolist() == [64, 80, 35] + [144] * padding
    assert section(rows, "context_lens", bucket).tolist() == [17, 1, 4] + [1] * padding
    assert section(rows, "cu_seqlens_q", bucket + 1).tolist() == list(range(bucket + 1))
    assert section(rows, "logits_indices", bucket).tolist() == list(range(bucket))
    assert tables(rows, bucket)[:3, :2].tolist() == GENERATIONS.block_tables.tolist()
    assert tables(rows, bucket)[3:, 0].tolist() == [SCRATCH] * padding
    assert used == rows.layout.used(bucket)


def test_an_iteration_leaves_nothing_of_the_one_before() -> None:
    """Fewer generations after more: what were rows are padding now."""
    rows, fresh = staged(), staged()
    rows.fill_generations(GENERATIONS, 6, SCRATCH)
    one = replace(
        GENERATIONS,
        token_ids=np.array([8]),
        position_ids=np.array([33]),
        slot_mapping=np.array([17]),
        cu_seqlens_q=np.array([0, 1], dtype=np.int32),
        context_lens=np.array([34], dtype=np.int32),
        block_tables=np.array([[6, 3, 1]], dtype=np.int32),
        logits_indices=np.array([0]),
    )
    for some in (rows, fresh):
        some.fill_generations(one, 4, SCRATCH)
    for name, count in (("token_ids", 4), ("position_ids", 4), ("slot_mapping", 4),
                        ("context_lens", 4), ("cu_seqlens_q", 5)):  # fmt: skip
        np.testing.assert_array_equal(section(rows, name, count), section(fresh, name, count))
    np.testing.assert_array_equal(tables(rows, 4)[:, 0], [6, 9, 9, 9])
