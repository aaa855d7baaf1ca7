"""Case: one kernel on one dtype and shape against its torch reference, on any device.

The tests run them under Triton's interpreter, tests/gpu/kernel_correctness.py on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kernel: str
    dtype: torch.dtype
    shape: str
    """In words, for people."""
    sizes: Mapping[str, int]
    """What of the shape a kernel is compiled for, or cut by: a name for each number."""
    run: Callable[[torch.device], float]
    """The largest error, in units of what is allowed: at most 1 where the kernel is right."""

    @property
    def name(self) -> str:
        return f"{self.kernel}, {dtype_name(self.dtype)}, {self.shape}"


def dtype_name(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names[dtype]


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Of a result that was rounded once; in fp32 what its sums add.

    The interpreter cuts bf16 off where a card rounds it.
    """
    bf16 = 2.0**-7 if device.type == "cpu" else 2.0**-8
    return {torch.float32: 2e-5, torch.float16: 2.0**-11, torch.bfloat16: bf16}[dtype]


def excess(got: Tensor, want: Tensor, tolerance: float) -> float:
    """The largest |got - want| / (tolerance * (1 + |want|)); infinite where one is not a number."""
    assert got.shape == want.shape
    got, want = got.double(), want.to(got.device).double()
    errors = (got - want).abs() / (tolerance * (1.0 + want.abs()))
    return float(errors.nan_to_num(nan=torch.inf).amax()) if errors.numel() else 0.0


def exact(got: Tensor, want: Tensor) -> float:
    """0 where all bits are the same (NaNs included), else infinity."""
    same = got.dtype == want.dtype and torch.equal(bits(got), bits(want.to(got.device)))
    return 0.0 if same else torch.inf


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def random(generator: torch.Generator, *shape: int) -> Tensor:
    """float32 on the CPU, normal."""
    return torch.randn(*shape, generator=generator)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN: whoever reads it without having written it shows it."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
