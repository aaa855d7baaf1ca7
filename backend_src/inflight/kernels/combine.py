"""What a token's experts have given, added up."""

from __future__ import annotations

from torch import Tensor

from inflight.kernels.language import jit, tiles, tl
from inflight.kernels.routing import Routing

COLUMNS = 1024


def combine(results: Tensor, routing: Routing, shared: Tensor | None, out: Tensor) -> None:
    """out [T, N] = the sum of each token's results, choice by choice, each times its weight, and
    last those of the shared expert.

    results [T * k, N], a row for each choice; shared [T, N] where ``routing`` has a shared expert.
    All fp32, fp16 or bf16, and contiguous; sums are fp32, always in the same order.
    """
    num_rows, width = out.shape
    assert results.shape == (len(routing.choices), width) and num_rows == len(routing.weights)
    assert (shared is not None) == (routing.num_shared == 1)
    assert shared is None or (shared.shape == out.shape and shared.is_contiguous())
    assert results.is_contiguous() and out.is_contiguous()
    if num_rows == 0:
        return
    _combine[(num_rows, tiles(width, COLUMNS))](
        results,
        routing.weights,
        results if shared is None else shared,
        out,
        NUM_CHOSEN=routing.num_chosen,
        HAS_SHARED=shared is not None,
        WIDTH=width,
        BLOCK=COLUMNS,
        num_warps=4,
    )


@jit()
def _combine(
    results_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_CHOSEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (T, tiles of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    weights_ptr += row * (NUM_CHOSEN + HAS_SHARED)
    result_ptrs = results_ptr + row * NUM_CHOSEN * WIDTH + columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        result = tl.load(result_ptrs + choice * WIDTH, mask=is_column, other=0.0)
        total += tl.load(weights_ptr + choice) * result.to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * WIDTH + columns, mask=is_column, other=0.0)
        total += tl.load(weights_ptr + NUM_CHOSEN) * shared.to(tl.float32)
    out_ptrs = out_ptr + row * WIDTH + columns
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_column)
