"""Products for the tests of native linears, and what they come to in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native.library import Isa
from inflight.native.packed import PackedLinear, WeightKind, pack_linear

GUARD = 12345.0
"""What no product of these tests is."""
EXPANDED_FROM = {"q8_0": 32, "q4_0": 11, "q4_1": 11}
"""Rows from which AMX takes quantized weights expanded to bf16."""
TOLERANCE = 1e-5
"""Of fp32 sums. A weight of q4_1 may round to bf16 the other way once in a long while."""


def random_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_of(n: int, k: int, kind: WeightKind) -> PackedLinear:
    return pack_linear(random_of(n, k, seed=1) / math.sqrt(k), random_of(n, seed=2), kind)


def in_groups_of_8_bits(x: Tensor, isa: Isa) -> Tensor:
    """What x is after each group of 32 was rounded to 127 steps either way, as float64.

    In the arithmetic of the kernels, since a quotient may fall in the middle between two steps:
    with a fused multiply-add it is rounded to a step at once, without to float32 first.
    """
    padded = F.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scale = padded.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    fused = isa >= Isa.AVX2
    steps = (padded.double() * inverse if fused else padded * inverse).round()
    return (steps.double() * scale).flatten(1)[:, : x.shape[1]]


def bf16_half_away(value: Tensor) -> Tensor:
    """Rounded to the nearest bf16 and from the middle between two to the larger magnitude."""
    bits = value.float().view(torch.int32)
    return ((bits + 0x8000) & -0x10000).view(torch.float32).double()


def bf16(value: Tensor) -> Tensor:
    return value.bfloat16().double()


def exact(x: Tensor, packed: PackedLinear, isa: Isa) -> Tensor:
    """The product in float64 of what the kernels multiply: rows and weights as they round them."""
    weight, bias = packed.unpack(), packed.unpack_bias()
    x = x.float()
    if packed.kind == "f32":
        y = x.double() @ weight.double().T
    elif packed.kind == "bf16":
        y = (bf16(x) if isa >= Isa.AVX512 else x.double()) @ weight.double().T
    elif isa == Isa.AMX and len(x) >= EXPANDED_FROM[packed.kind]:
        y = bf16(x) @ bf16_half_away(weight).T
    else:
        y = in_groups_of_8_bits(x, isa) @ weight.double().T
    return y if bias is None else y + bias.double()


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())
