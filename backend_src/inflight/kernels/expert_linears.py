"""The linears of experts: rows that lie together by expert, each times its expert's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from inflight.kernels.functions import activated
from inflight.kernels.language import is_interpreted, jit, power_of_2, tiles, tl
from inflight.kernels.routing import Routing

GateActivation = Literal["silu", "gelu_tanh"]

MANY_ROWS = 32
"""From so many rows an expert on, on average, tiles are high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """How the products are cut into programs; sizes are powers of 2."""

    rows: int
    columns: int
    """Of the weights that a program reads: with a gate half of them are the gate's."""
    depth: int
    """Numbers of a row that it takes at a time."""
    num_warps: int
    num_stages: int


def _launch_for(num_rows: int, num_experts: int, dtype: torch.dtype) -> _Launch:
    """One of two, so that the smallest and the largest iteration compile all there are. Both fit
    into the shared memory of any card since compute capability 8.0 (99 KiB)."""
    halves = 2 if dtype is torch.float32 else 1
    if num_rows < MANY_ROWS * num_experts:
        return _Launch(rows=16, columns=64, depth=128 // halves, num_warps=4, num_stages=4)
    rows = 128 // halves
    return _Launch(rows=rows, columns=128, depth=64 // halves, num_warps=8, num_stages=3)


def expert_gate_ups(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    out: Tensor,
    activation: GateActivation,
    *,
    scales: Tensor | None = None,
) -> None:
    """out [T * k, I], a row for each of the experts' rows = activation(x W_gate^T) * (x W_up^T) of
    its token's x [T, H], with the weights of its expert in ``weight`` [E, 2 * I, H], first the rows
    of the gate. All fp32, fp16 or bf16, and contiguous; sums and activation are fp32.

    ``scales``: fp32[E, 2 * I] of weights in fp8 (e4m3), whose rows are their numbers times their
    scale: numbers meet x in x's dtype, which holds them exactly, and sums are scaled.
    """
    assert weight.shape == (routing.num_experts, 2 * out.shape[1], x.shape[1])
    assert len(x) == len(routing.weights)
    _run(x, (weight, scales), routing, out, activation)


def expert_linears(
    x: Tensor, weight: Tensor, routing: Routing, out: Tensor, *, scales: Tensor | None = None
) -> None:
    """out [T * k, N], a row for each choice = x W^T of its row of x [T * k, K], with the weights of
    its expert in ``weight`` [E, N, K], with ``scales`` fp32[E, N]; otherwise as
    ``expert_gate_ups``."""
    assert weight.shape == (routing.num_experts, out.shape[1], x.shape[1])
    assert len(x) == len(routing.choices)
    _run(x, (weight, scales), routing, out, None)


def _run(
    x: Tensor,
    weights: tuple[Tensor, Tensor | None],
    routing: Routing,
    out: Tensor,
    activation: GateActivation | None,
) -> None:
    weight, scales = weights
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    assert len(out) == len(routing.choices)
    if scales is None:
        assert x.dtype is weight.dtype
    else:
        assert weight.dtype is torch.float8_e4m3fn and scales.dtype is torch.float32
        assert scales.shape == weight.shape[:2] and scales.is_contiguous()
        weight = weight.view(torch.uint8)
    num_rows, width = out.shape
    if num_rows == 0:
        return
    num_experts, has_gate = routing.num_experts, activation is not None
    launch = _launch_for(num_rows, num_experts, x.dtype)
    columns = launch.columns // 2 if has_gate else launch.columns
    # Each expert that has rows has at most one tile that is not full.
    num_tiles = (num_rows + min(num_experts, num_rows) * (launch.rows - 1)) // launch.rows
    _multiply[(tiles(width, columns), num_tiles)](
        x,
        weight,
        weight if scales is None else scales,  # absent: never read
        out,
        routing.choices,
        routing.ends,
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=power_of_2(num_experts),
        NUM_CHOSEN=routing.num_chosen,
        WIDTH=width,
        DEPTH=x.shape[1],
        ROWS=launch.rows,
        COLUMNS=columns,
        STEP=launch.depth,
        HAS_GATE=has_gate,
        HAS_SCALES=scales is not None,
        ACTIVATION=activation or "",
        DOT_IN_FP32=is_interpreted(_multiply),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


@jit()
def _multiply(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    choices_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> None:
    """Grid: (tiles of columns, tiles of rows). Programs that run at the same time share rows, and
    the weights of one expert. The last tiles of rows may have nothing to do."""
    expert, first_row, end = _tile(tl.program_id(1), ends_ptr, NUM_EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert >= NUM_EXPERTS:
        return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end
    choices = tl.load(choices_ptr + rows, mask=is_row, other=0)
    sources, targets = rows, choices
    if HAS_GATE:
        sources, targets = choices // NUM_CHOSEN, rows
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    steps = tl.arange(0, STEP)
    x_ptrs = x_ptr + sources.to(tl.int64)[:, None] * DEPTH + steps[None, :]
    weight_ptr += expert.to(tl.int64) * ((1 + HAS_GATE) * WIDTH * DEPTH)
    weight_ptrs = weight_ptr + columns[None, :].to(tl.int64) * DEPTH + steps[:, None]

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, DEPTH, STEP):
        is_in, is_weight = is_row[:, None], is_column[None, :]
        if DEPTH % STEP != 0:
            is_step = first + steps < DEPTH
            is_in, is_weight = is_in & is_step[None, :], is_weight & is_step[:, None]
        x = tl.load(x_ptrs + first, mask=is_in, other=0.0)
        weight = _load_weight(weight_ptrs + first, is_weight, x_ptr.dtype.element_ty, HAS_SCALES)
        if DOT_IN_FP32:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if HAS_GATE:
            up_ptrs = weight_ptrs + (WIDTH * DEPTH + first)
            up = _load_weight(up_ptrs, is_weight, x_ptr.dtype.element_ty, HAS_SCALES)
            if DOT_IN_FP32:
                up = up.to(tl.float32)
            ups = tl.dot(x, up, ups, input_precision="ieee")
    if HAS_SCALES:
        scale_ptrs = scales_ptr + expert.to(tl.int64) * ((1 + HAS_GATE) * WIDTH) + columns
        total *= tl.load(scale_ptrs, mask=is_column, other=0.0)[None, :]
        if HAS_GATE:
            ups *= tl.load(scale_ptrs + WIDTH, mask=is_column, other=0.0)[None, :]
    if HAS_GATE:
        total = activated(total, ACTIVATION) * ups
    out_ptrs = out_ptr + targets.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_out)


@jit()
def _load_weight(
    ptrs: tl.tensor, mask: tl.tensor, dtype: tl.constexpr, IS_FP8: tl.constexpr
) -> tl.tensor:
    """In ``dtype``; of fp8 the pointers are to its bytes."""
    if IS_FP8:
        bits = tl.load(ptrs, mask=mask, other=0)
        weight = bits.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        weight = tl.load(ptrs, mask=mask, other=0.0)
    return weight


@jit()
def _tile(
    tile: tl.tensor,
    ends_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Whose tile it is, its first row, and the row after the last one of that expert. Tiles are
    counted through the experts; after the last one there is no expert, but a number that is not
    below NUM_EXPERTS."""
    experts = tl.arange(0, EXPERTS_BLOCK)
    is_expert = experts < NUM_EXPERTS
    ends = tl.load(ends_ptr + experts, mask=is_expert, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=is_expert & (experts > 0), other=0)
    tile_ends = tl.cumsum((ends - starts + ROWS - 1) // ROWS, axis=0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    is_own = experts == expert
    first_tile = tl.max(tl.where(experts < expert, tile_ends, 0), axis=0)
    start = tl.sum(tl.where(is_own, starts, 0), axis=0)
    end = tl.sum(tl.where(is_own, ends, 0), axis=0)
    return expert, start + (tile - first_tile) * ROWS, end
