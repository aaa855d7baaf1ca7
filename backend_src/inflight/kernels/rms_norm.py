"""RMSNorm of rows, with the addition to the residual that comes before it."""

from __future__ import annotations

from torch import Tensor

from inflight.kernels.language import jit, power_of_2, tl

MAX_WIDTH = 1 << 15
"""A row is held in registers."""


def rms_norm(
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    out: Tensor,
    *,
    delta: Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    """residual [T, H] += delta [T, H], in place; then out [T, H] = residual / sqrt(mean(residual^2)
    + epsilon) * (weight [H] + weight_offset).

    Each tensor is fp32, fp16 or bf16, with the numbers of a row side by side; sums are fp32, and
    the norm is of the residual as it is stored. ``out`` may be ``residual`` where there is no
    ``delta``. H is at most MAX_WIDTH.
    """
    num_rows, width = residual.shape
    assert width <= MAX_WIDTH and out.shape == residual.shape and weight.numel() == width
    assert residual.stride(1) == out.stride(1) == weight.stride(0) == 1
    assert delta is None or (delta.shape == residual.shape and delta.stride(1) == 1)
    if num_rows == 0:
        return
    block = power_of_2(width)
    added = residual if delta is None else delta
    _rms_norm[(num_rows,)](
        residual,
        added,
        weight,
        out,
        residual.stride(0),
        added.stride(0),
        out.stride(0),
        epsilon,
        weight_offset,
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        # No number is held by two threads: one would add what the other has added already.
        num_warps=min(max(block // 256, 1), 16),
    )


@jit()
def _rms_norm(
    residual_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    residual_stride: tl.tensor,
    delta_stride: tl.tensor,
    out_stride: tl.tensor,
    epsilon: tl.tensor,
    weight_offset: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    residual_ptrs = residual_ptr + row * residual_stride + columns
    x = tl.load(residual_ptrs, mask=is_column, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptrs, x, mask=is_column)
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    normalised = x * factor * (weight + weight_offset)
    out_ptrs = out_ptr + row * out_stride + columns
    tl.store(out_ptrs, normalised.to(out_ptr.dtype.element_ty), mask=is_column)
