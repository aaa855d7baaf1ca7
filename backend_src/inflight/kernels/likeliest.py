"""The largest logit of each row, and whose it is."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.language import jit, power_of_2, tiles, tl

COLUMNS = 4096
"""Logits of one program."""


def likeliest_parts(vocab_size: int) -> int:
    """Columns of the room that ``likeliest`` needs."""
    return tiles(vocab_size, COLUMNS)


def likeliest(logits: Tensor, ids: Tensor, largest: Tensor, room: tuple[Tensor, Tensor]) -> None:
    """ids int32[R] = the id of each row's largest logit, the lowest of equal ones; largest
    float32[R] = that logit, or NaN where any logit of the row is NaN: only where it is finite the
    id means something.

    ``logits``: [R, vocab_size], fp32, fp16 or bf16, with the numbers of a row side by side.
    ``room``: float32 and int32, each of R * likeliest_parts(vocab_size) numbers or more.
    """
    num_rows, vocab_size = logits.shape
    part_largest, part_ids = room
    num_parts = likeliest_parts(vocab_size)
    assert logits.stride(1) == 1 and ids.dtype is torch.int32 and largest.dtype is torch.float32
    assert len(ids) == len(largest) == num_rows
    assert min(part_largest.numel(), part_ids.numel()) >= num_rows * num_parts
    if num_rows == 0:
        return
    _largest_of_part[(num_rows, num_parts)](
        logits,
        part_largest,
        part_ids,
        logits.stride(0),
        num_parts,
        VOCAB_SIZE=vocab_size,
        BLOCK=COLUMNS,
        num_warps=8,
    )
    _largest_of_row[(num_rows,)](
        part_largest,
        part_ids,
        largest,
        ids,
        NUM_PARTS=num_parts,
        BLOCK=power_of_2(num_parts),
        num_warps=1,
    )


@jit()
def _largest_of_part(
    logits_ptr: tl.tensor,
    part_largest_ptr: tl.tensor,
    part_ids_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_parts: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < VOCAB_SIZE
    x = tl.load(logits_ptr + row * logits_stride + columns, mask=is_column, other=float("-inf"))
    x = x.to(tl.float32)
    largest, column = _largest(x, columns)
    tl.store(part_largest_ptr + row * num_parts + part, largest)
    tl.store(part_ids_ptr + row * num_parts + part, column)


@jit(("largest_ptr", "ids_ptr"))
def _largest_of_row(
    part_largest_ptr: tl.tensor,
    part_ids_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    is_part = parts < NUM_PARTS
    places = row * NUM_PARTS + parts
    x = tl.load(part_largest_ptr + places, mask=is_part, other=float("-inf"))
    candidates = tl.load(part_ids_ptr + places, mask=is_part, other=2147483647)
    largest, column = _largest(x, candidates)
    tl.store(largest_ptr + row, largest)
    tl.store(ids_ptr + row, column)


@jit()
def _largest(x: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The largest of x and the lowest id it has; NaN when there is one among x."""
    largest = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    has_nan = tl.max(tl.where(x == x, 0, 1), axis=0) == 1
    lowest = tl.min(tl.where(x == largest, ids, 2147483647), axis=0)
    return tl.where(has_nan, float("nan"), largest), lowest
