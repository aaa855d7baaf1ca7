"""Between projection and attention: norms of queries and keys, rope, K and V to their slots."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from inflight.kernels.language import jit, power_of_2, tiles, tl

HEADS = 8
"""Heads of a program at most."""


class HeadRules(Protocol):
    """What one layer does with its heads, as ``native.attention.LayerRules`` describes it; tensors
    are contiguous fp32 on the device."""

    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def cos_sin(self) -> Tensor | None: ...
    @property
    def q_norm(self) -> Tensor | None: ...
    @property
    def k_norm(self) -> Tensor | None: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def norm_offset(self) -> float: ...


def rope_and_write(
    qkv: Tensor,
    query: Tensor,
    cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    rules: HeadRules,
) -> None:
    """query [T, num_heads, head_dim] = the query heads of ``qkv``, K and V go to their slots.

    ``qkv``: [T, (num_heads + 2 * num_kv_heads) * head_dim], fp32, fp16 or bf16: the query heads of
    a row, then its key heads, then its value heads. ``cache``: of a layer, as kv_layout.py has it.
    ``positions``, ``slots``: int32[T]; a position is a row of ``cos_sin``, a slot is block_id *
    tokens_per_block + offset, and rows that nobody wants write to a slot that nobody reads. Norm
    and rope are computed in fp32 and rounded once.
    """
    num_rows = len(positions)
    num_kv_heads, tokens_per_block = cache.shape[2], cache.shape[3]
    head_dim, width = rules.head_dim, (rules.num_heads + 2 * num_kv_heads) * rules.head_dim
    assert qkv.shape == (num_rows, width) and qkv.stride(1) == 1
    assert query.shape == (num_rows, rules.num_heads, head_dim)
    assert query.stride()[1:] == (head_dim, 1)
    assert cache.shape[4] == head_dim and cache.is_contiguous()
    assert slots.shape == positions.shape and positions.is_contiguous() and slots.is_contiguous()
    assert slots.dtype is positions.dtype is torch.int32
    if num_rows == 0:
        return
    absent = qkv  # stands where a pointer is never read
    cos_sin, q_norm, k_norm = rules.cos_sin, rules.q_norm, rules.k_norm
    heads = min(HEADS, power_of_2(rules.num_heads))
    parts = tiles(rules.num_heads, heads) + 2 * tiles(num_kv_heads, heads)
    _rope_and_write[(num_rows, parts)](
        qkv,
        query,
        cache,
        positions,
        slots,
        absent if cos_sin is None else cos_sin,
        absent if q_norm is None else q_norm,
        absent if k_norm is None else k_norm,
        qkv.stride(0),
        query.stride(0),
        cache.stride(0),
        cache.stride(1),
        rules.norm_epsilon,
        rules.norm_offset,
        NUM_HEADS=rules.num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=power_of_2(head_dim),
        ROTARY_DIM=0 if cos_sin is None else cos_sin.shape[1],
        TOKENS_PER_BLOCK=tokens_per_block,
        QUERY_NORM=0 if q_norm is None else q_norm.numel(),
        KEY_NORM=0 if k_norm is None else k_norm.numel(),
        HEADS=heads,
        num_warps=4,
    )


@jit(("positions_ptr", "slots_ptr"))
def _rope_and_write(
    qkv_ptr: tl.tensor,
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    query_stride: tl.tensor,
    value_offset: tl.tensor,
    block_stride: tl.tensor,
    epsilon: tl.tensor,
    norm_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """A program has some heads of one row: of the queries, of the keys, or of the values."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    row_ptr = qkv_ptr + row * qkv_stride
    position = tl.load(positions_ptr + row)
    if part < query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        turned = _turned(
            row_ptr, heads, q_norm_ptr, cos_sin_ptr, position, epsilon, norm_offset,
            NUM_HEADS, HEAD_DIM, HEAD_BLOCK, ROTARY_DIM, QUERY_NORM,
        )  # fmt: skip
        _store(query_ptr + row * query_stride, turned, heads, HEAD_DIM, NUM_HEADS, HEAD_DIM)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        block, offset = slot // TOKENS_PER_BLOCK, slot % TOKENS_PER_BLOCK
        target_ptr = cache_ptr + block * block_stride + offset * HEAD_DIM
        head_stride: tl.constexpr = TOKENS_PER_BLOCK * HEAD_DIM
        key_ptr = row_ptr + NUM_HEADS * HEAD_DIM
        if part < query_parts + kv_parts:
            heads = (part - query_parts) * HEADS + tl.arange(0, HEADS)
            turned = _turned(
                key_ptr, heads, k_norm_ptr, cos_sin_ptr, position, epsilon, norm_offset,
                NUM_KV_HEADS, HEAD_DIM, HEAD_BLOCK, ROTARY_DIM, KEY_NORM,
            )  # fmt: skip
            _store(target_ptr, turned, heads, head_stride, NUM_KV_HEADS, HEAD_DIM)
        else:
            heads = (part - query_parts - kv_parts) * HEADS + tl.arange(0, HEADS)
            value_ptr = key_ptr + NUM_KV_HEADS * HEAD_DIM
            dims = tl.arange(0, HEAD_BLOCK)
            is_in = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
            value_ptrs = value_ptr + heads[:, None] * HEAD_DIM + dims[None, :]
            values = tl.load(value_ptrs, mask=is_in, other=0.0)
            _store(target_ptr + value_offset, values, heads, head_stride, NUM_KV_HEADS, HEAD_DIM)


@jit()
def _turned(
    heads_ptr: tl.tensor,
    heads: tl.tensor,
    norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    position: tl.tensor,
    epsilon: tl.tensor,
    norm_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_SIZE: tl.constexpr,
) -> tl.tensor:
    """fp32[HEADS, HEAD_BLOCK]: the heads of one row after norm and rope."""
    dims = tl.arange(0, HEAD_BLOCK)
    is_in = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(heads_ptr + offsets, mask=is_in, other=0.0).to(tl.float32)
    factor = tl.full([1, 1], 1.0, tl.float32)
    if NORM_SIZE > 0:
        if NORM_SIZE == HEAD_DIM:
            factor = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / HEAD_DIM + epsilon)
            weight_offsets = dims[None, :] + heads[:, None] * 0
        else:
            factor = _row_factor(heads_ptr, epsilon, NORM_SIZE)
            weight_offsets = offsets
        weights = tl.load(norm_ptr + weight_offsets, mask=is_in, other=0.0)
        x = x * factor * (weights + norm_offset)
    if ROTARY_DIM > 0:
        half: tl.constexpr = ROTARY_DIM // 2
        is_turned = dims < ROTARY_DIM
        # Dimension i turns with its partner, half a rotary_dim away.
        shift = tl.where(dims < half, half, -half)
        partner_in = is_in & is_turned[None, :]
        partner = tl.load(heads_ptr + offsets + shift[None, :], mask=partner_in, other=0.0)
        partner = partner.to(tl.float32)
        if NORM_SIZE > 0:
            partner_weight_ptrs = norm_ptr + weight_offsets + shift[None, :]
            partner_weights = tl.load(partner_weight_ptrs, mask=partner_in, other=0.0)
            partner = partner * factor * (partner_weights + norm_offset)
        angle_ptrs = cos_sin_ptr + position.to(tl.int64) * ROTARY_DIM + dims % half
        cosines = tl.load(angle_ptrs, mask=is_turned, other=1.0)
        sines = tl.load(angle_ptrs + half, mask=is_turned, other=0.0)
        sines = tl.where(dims < half, -sines, sines)
        x = x * cosines[None, :] + partner * sines[None, :]
    return x


@jit()
def _row_factor(heads_ptr: tl.tensor, epsilon: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """1 / rms of all heads of a row; each of its programs computes it again."""
    BLOCK: tl.constexpr = 1024
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        x = tl.load(heads_ptr + first + columns, mask=first + columns < SIZE, other=0.0)
        x = x.to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=0) / SIZE + epsilon)


@jit()
def _store(
    target_ptr: tl.tensor,
    x: tl.tensor,
    heads: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    dims = tl.arange(0, x.shape[1])
    is_in = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    target_ptrs = target_ptr + heads[:, None] * head_stride + dims[None, :]
    tl.store(target_ptrs, x.to(target_ptr.dtype.element_ty), mask=is_in)
