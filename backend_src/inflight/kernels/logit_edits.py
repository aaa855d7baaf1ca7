"""What requests change in their logits before a token is chosen, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.language import jit, tiles, tl
from inflight.kernels.sampling_rows import SamplingRows

COLUMNS = 4096
"""Logits that a program takes at a time."""
LISTED = 256
"""Numbers of a row's list that it takes at a time."""


def edit_logits(logits: Tensor, rows: SamplingRows) -> None:
    """Brings ``rows.counts`` up to the sequences, and then edits ``logits`` float32[R, V], with the
    numbers of a row side by side, but for rows that are left: biases, penalties, masks, as
    ``inflight.sampling.edits.LogitEdits`` says."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    assert rows.counts.shape[1] == vocab_size and rows.counts.is_contiguous()
    if num_rows == 0:
        return
    columns = tiles(vocab_size, COLUMNS)
    if len(rows.fresh_slots):
        _forget[(len(rows.fresh_slots), columns)](
            rows.counts, rows.fresh_slots, VOCAB_SIZE=vocab_size, BLOCK=COLUMNS, num_warps=8
        )
    if len(rows.counted_ids):
        _count[(num_rows,)](
            rows.counts, rows.slots, rows.counted_starts, rows.counted_ids,
            VOCAB_SIZE=vocab_size, BLOCK=LISTED, num_warps=4,
        )  # fmt: skip
    if len(rows.bias_ids):
        _add_biases[(num_rows,)](
            logits, rows.is_left, rows.bias_starts, rows.bias_ids, rows.biases, logits.stride(0),
            BLOCK=LISTED, num_warps=4,
        )  # fmt: skip
    if rows.has_penalties:
        _penalise[(num_rows, columns)](
            logits, rows.is_left, rows.counts, rows.slots, rows.repetition_penalties,
            rows.presence_penalties, rows.frequency_penalties, logits.stride(0),
            VOCAB_SIZE=vocab_size, BLOCK=COLUMNS, num_warps=8,
        )  # fmt: skip
    if len(rows.masked_ids):
        _mask[(num_rows,)](
            logits, rows.is_left, rows.masked_starts, rows.masked_ids, logits.stride(0),
            VOCAB_SIZE=vocab_size, BLOCK=COLUMNS, LISTED=LISTED, num_warps=8,
        )  # fmt: skip


@jit(("fresh_slots_ptr",))
def _forget(
    counts_ptr: tl.tensor,
    fresh_slots_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (fresh slots, tiles of V)."""
    slot = tl.load(fresh_slots_ptr + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.int32)
    tl.store(counts_ptr + slot * VOCAB_SIZE + ids, nothing, mask=ids < VOCAB_SIZE)


@jit(("slots_ptr", "starts_ptr", "counted_ids_ptr"))
def _count(
    counts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    counted_ids_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (R,). Integers: in whatever order they are added, the sum is the same."""
    row = tl.program_id(0)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    for first in range(start, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(counted_ids_ptr + places, mask=places < end, other=0)
        ones = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_add(counts_ptr + slot * VOCAB_SIZE + ids, ones, mask=places < end)


@jit(("is_left_ptr", "starts_ptr", "bias_ids_ptr", "biases_ptr"))
def _add_biases(
    logits_ptr: tl.tensor,
    is_left_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    bias_ids_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_left_ptr + row) != 0:
        return
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    for first in range(start, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_place = places < end
        ids = tl.load(bias_ids_ptr + places, mask=is_place, other=0)
        bias = tl.load(biases_ptr + places, mask=is_place, other=0.0)
        x_ptrs = logits_ptr + row * logits_stride + ids
        tl.store(x_ptrs, tl.load(x_ptrs, mask=is_place, other=0.0) + bias, mask=is_place)


@jit(("is_left_ptr", "slots_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"))
def _penalise(
    logits_ptr: tl.tensor,
    is_left_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (R, tiles of V)."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    is_neutral = (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)
    if is_neutral | (tl.load(is_left_ptr + row) != 0):
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_id = ids < VOCAB_SIZE
    count = tl.load(counts_ptr + slot * VOCAB_SIZE + ids, mask=is_id, other=0)
    is_seen = count > 0
    x_ptrs = logits_ptr + row * logits_stride + ids
    x = tl.load(x_ptrs, mask=is_seen, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = x - presence - frequency * count.to(tl.float32)
    tl.store(x_ptrs, x, mask=is_seen)


@jit(("is_left_ptr", "starts_ptr", "masked_ids_ptr"))
def _mask(
    logits_ptr: tl.tensor,
    is_left_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    masked_ids_ptr: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    """Grid: (R,). Where the masks would leave nothing, they are not applied: so what can be chosen
    is counted in the row and among the masked before anything is written."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (start == end) | (tl.load(is_left_ptr + row) != 0):
        return
    row_ptr = logits_ptr + row * logits_stride
    usable = tl.zeros([BLOCK], tl.int32)
    for first in range(0, VOCAB_SIZE, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < VOCAB_SIZE, other=float("-inf"))
        usable += (x > float("-inf")).to(tl.int32)
    masked = tl.zeros([LISTED], tl.int32)
    for first in range(start, end, LISTED):
        places = first + tl.arange(0, LISTED)
        ids = tl.load(masked_ids_ptr + places, mask=places < end, other=0)
        x = tl.load(row_ptr + ids, mask=places < end, other=float("-inf"))
        masked += (x > float("-inf")).to(tl.int32)
    if tl.sum(masked, axis=0) < tl.sum(usable, axis=0):
        for first in range(start, end, LISTED):
            places = first + tl.arange(0, LISTED)
            ids = tl.load(masked_ids_ptr + places, mask=places < end, other=0)
            tl.store(row_ptr + ids, float("-inf"), mask=places < end)
