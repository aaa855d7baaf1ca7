"""Linears of a device: dense, and with fp8 weights that have a scale for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8_DTYPE).max
FP8_MULTIPLE = 16
"""Rows and columns of fp8 weights are multiples of it."""

_HAS_FP32_SUMS = hasattr(torch.ops.aten.mm, "dtype")
"""Of this torch's products on CUDA; other devices never have them."""

ScaledProduct = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""(x fp8[T, k], weight fp8[n, k], scales of x fp32[T, 1], scales of weight fp32[n, 1], dtype) ->
[T, n] = (x * its scales) (weight * its scales)^T in dtype, summed in fp32."""


class DeviceLinear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, n], new, in x's dtype: x [T, k] W^T + bias."""
        ...


class DenseLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """W [n, k] and bias [n] of one dtype, that of the activations."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def in_fp32(self, x: Tensor) -> Tensor:
        """float32[T, n]: the sums before they are rounded, where the device gives them."""
        if x.dtype is not torch.float32 and x.device.type == "cuda" and _HAS_FP32_SUMS:
            product: Tensor = torch.ops.aten.mm.dtype(x, self.weight.t(), torch.float32)
            return product if self.bias is None else product.add_(self.bias)
        return F.linear(x, self.weight, self.bias).float()


class Fp8Linear:
    """Rows of x are rounded to fp8 with a scale each as they come."""

    def __init__(self, weight: Tensor, bias: Tensor | None, product: ScaledProduct) -> None:
        """W [n, k], multiples of FP8_MULTIPLE, and bias [n] as in DenseLinear."""
        self.weight, self.scales = quantize_rows(weight)
        self.bias = bias
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = quantize_rows(x)
        y = self._product(rows, self.weight, scales, self.scales, x.dtype)
        return y if self.bias is None else y.add_(self.bias)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp8[T, k] and fp32[T, 1]: the rows are the one times the other, rounded to nearest. A scale
    takes the largest magnitude of its row to that of fp8."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    scales = largest.clamp_min(torch.finfo(torch.float32).tiny * LARGEST_FP8) / LARGEST_FP8
    # The division may end a hair above what fp8 holds, which would make it NaN.
    scaled = (rows.float() / scales).clamp(-LARGEST_FP8, LARGEST_FP8)
    return scaled.to(FP8_DTYPE), scales


def scaled_product(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """A ScaledProduct on GPUs that multiply fp8."""
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=dtype, use_fast_accum=True
    )


def reference_scaled_product(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """A ScaledProduct on any device."""
    return ((x.float() * x_scales) @ (weight.float() * scales).t()).to(dtype)
