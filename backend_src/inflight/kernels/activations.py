"""The activations between the linears of an MLP, with a gate and without."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from inflight.kernels.functions import activated
from inflight.kernels.language import jit, tiles, tl

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""relu2 is the square of relu; gelu is the exact one, gelu_tanh its approximation."""

COLUMNS = 1024


def gated_product(gate_up: Tensor, out: Tensor, activation: Activation) -> None:
    """out [T, I] = activation(gate) * up; gate_up [T, 2 * I] has first the gates of a row and then
    its ups. Each fp32, fp16 or bf16, with the numbers of a row side by side; computed in fp32."""
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width)
    _launch(gate_up, out, activation, has_gate=True)


def activate(x: Tensor, out: Tensor, activation: Activation) -> None:
    """out [T, I] = activation(x [T, I]), as ``gated_product`` otherwise; ``out`` may be ``x``."""
    assert x.shape == out.shape
    _launch(x, out, activation, has_gate=False)


def _launch(x: Tensor, out: Tensor, activation: Activation, *, has_gate: bool) -> None:
    num_rows, width = out.shape
    assert x.stride(1) == out.stride(1) == 1
    if num_rows == 0:
        return
    _activate[(num_rows, tiles(width, COLUMNS))](
        x,
        out,
        x.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=COLUMNS,
        ACTIVATION=activation,
        HAS_GATE=has_gate,
        num_warps=4,
    )


@jit()
def _activate(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_GATE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    x_ptrs = x_ptr + row * x_stride + columns
    y = activated(tl.load(x_ptrs, mask=is_column, other=0.0).to(tl.float32), ACTIVATION)
    if HAS_GATE:
        y *= tl.load(x_ptrs + WIDTH, mask=is_column, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * out_stride + columns
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_column)
