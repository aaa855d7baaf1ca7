"""Whole KV blocks: from one to another, and between the storage and flat rows (tiers)."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.language import jit, tiles, tl

WORDS = 2048
"""Words of 8 bytes that one program moves."""


def copy_blocks(storage: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies blocks in all layers of ``storage`` (kv_layout.py); ids int32[n] on the device.

    No target is among the sources of others, or named twice: programs run in any order. Blocks
    that are exchanged are gathered and then scattered.
    """
    assert source_ids.shape == target_ids.shape
    words = _storage_words(storage)
    _move(words, words, source_ids, target_ids)


def gather_blocks(storage: Tensor, ids: Tensor, flat: Tensor) -> None:
    """flat uint8[n, bytes of a block over all layers] = blocks ``ids`` int32[n]: of each layer the
    K and then the V of the block. ``flat`` may be pinned memory of the host."""
    _move(_storage_words(storage), _flat_words(storage, flat), ids, None)


def scatter_blocks(storage: Tensor, ids: Tensor, flat: Tensor) -> None:
    """What ``gather_blocks`` gave, into blocks ``ids``, all different."""
    _move(_flat_words(storage, flat), _storage_words(storage), None, ids)


def _storage_words(storage: Tensor) -> Tensor:
    """int64[num_layers * 2, num_blocks, words of a block's K or V]."""
    assert storage.is_contiguous()
    return storage.view(torch.int64).flatten(3).flatten(0, 1)


def _flat_words(storage: Tensor, flat: Tensor) -> Tensor:
    """The bytes with the axes of ``_storage_words``."""
    assert flat.dtype is torch.uint8 and flat.is_contiguous()
    num_parts = 2 * storage.shape[0]
    return flat.view(torch.int64).view(len(flat), num_parts, -1).transpose(0, 1)


def _move(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None
) -> None:
    """``None``: blocks 0, 1, .. one after the other."""
    ids = target_ids if source_ids is None else source_ids
    assert ids is not None and source.shape[2] == target.shape[2]
    assert all(some is None or some.dtype is torch.int32 for some in (source_ids, target_ids))
    if len(ids) == 0:
        return
    num_parts, _, num_words = source.shape
    _move_blocks[(len(ids), num_parts, tiles(num_words, WORDS))](
        source,
        target,
        ids if source_ids is None else source_ids,
        ids if target_ids is None else target_ids,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        NUM_WORDS=num_words,
        BLOCK=WORDS,
        SOURCE_BY_ID=source_ids is not None,
        TARGET_BY_ID=target_ids is not None,
        num_warps=8,
    )


@jit(
    (
        "source_ids_ptr",
        "target_ids_ptr",
        "source_part_stride",
        "target_part_stride",
    )
)
def _move_blocks(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_ids_ptr: tl.tensor,
    target_ids_ptr: tl.tensor,
    source_part_stride: tl.tensor,
    source_block_stride: tl.tensor,
    target_part_stride: tl.tensor,
    target_block_stride: tl.tensor,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCE_BY_ID: tl.constexpr,
    TARGET_BY_ID: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_word = words < NUM_WORDS
    source = item
    if SOURCE_BY_ID:
        source = tl.load(source_ids_ptr + item).to(tl.int64)
    target = item
    if TARGET_BY_ID:
        target = tl.load(target_ids_ptr + item).to(tl.int64)
    source_ptrs = source_ptr + part * source_part_stride + source * source_block_stride + words
    target_ptrs = target_ptr + part * target_part_stride + target * target_block_stride + words
    tl.store(target_ptrs, tl.load(source_ptrs, mask=is_word, other=0), mask=is_word)
