"""fp8 linears: the arithmetic of their scales, with torch's scaled product and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.model.device.linears import (
    FP8_DTYPE,
    LARGEST_FP8,
    DenseLinear,
    Fp8Linear,
    quantize_rows,
    reference_scaled_product,
    scaled_product,
)

pytestmark = pytest.mark.numeric

ROUNDING = 2.0**-4
"""Relative error of numbers with 3 bits behind the first."""


def random_rows(*shape: int, seed: int) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    return rows * 10.0 ** torch.linspace(-4, 4, shape[0])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_whole_again_within_the_rounding_of_fp8(dtype: torch.dtype) -> None:
    rows = random_rows(9, 64, seed=1).to(dtype)
    quantized, scales = quantize_rows(rows)
    assert quantized.dtype is FP8_DTYPE and scales.shape == (9, 1)
    assert scales.dtype is torch.float32
    back, exact = quantized.float() * scales, rows.float()
    smallest = 2.0**-9 * scales  # the distance of numbers that are too small for a first bit
    assert bool(((back - exact).abs() <= torch.maximum(ROUNDING * exact.abs(), smallest)).all())
    largest = exact.abs().argmax(-1, keepdim=True)
    assert torch.equal(quantized.float().gather(1, largest).abs(), torch.full((9, 1), LARGEST_FP8))


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite() -> None:
    rows = torch.zeros(3, 16)
    rows[1, 2] = torch.finfo(torch.float32).tiny
    rows[2, 3] = 1e-45
    quantized, scales = quantize_rows(rows)
    back = quantized.float() * scales
    assert bool(torch.isfinite(back).all()) and bool((scales > 0).all())
    assert not back[0].any() and torch.isclose(back[1, 2], rows[1, 2])


@pytest.mark.parametrize("num_rows", [1, 7])
def test_torch_multiplies_what_the_reference_multiplies(num_rows: int) -> None:
    x, x_scales = quantize_rows(random_rows(num_rows, 64, seed=2))
    weight, scales = quantize_rows(random_rows(32, 64, seed=3))
    ours = reference_scaled_product(x, weight, x_scales, scales, torch.float32)
    theirs = scaled_product(x, weight, x_scales, scales, torch.bfloat16).float()
    torch.testing.assert_close(theirs, ours, rtol=2.0**-7, atol=1e-6 * float(ours.abs().max()))


def test_each_row_has_its_own_scale() -> None:
    """One large row, of x or of the weights, leaves the others as exact as they were."""
    weight, bias = random_rows(32, 64, seed=4), torch.arange(32.0)
    x = random_rows(5, 64, seed=5)
    exact = DenseLinear(weight, bias)(x)
    got = Fp8Linear(weight, bias, reference_scaled_product)(x)
    spread = weight.norm(dim=1)[None] * x.norm(dim=1)[:, None]
    assert float(((got - exact).abs() / spread).max()) < ROUNDING / 2
    assert float((got - exact).abs().max()) > 0
