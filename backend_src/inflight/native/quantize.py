"""quantize: float weights as GGUF blocks, each group of 32 with its own scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.native.gguf_blocks import GROUP_SIZE, GgufBlocks, QuantizedKind

_ROWS_AT_ONCE = 4096
"""Bounds the temporary copies for a large head."""


def quantize(weight: Tensor, kind: QuantizedKind) -> GgufBlocks:
    """W [n, k] of any float dtype, rounded to the nearest value its groups can hold.

    k is padded with zeros to a multiple of 32. A scale or minimum is rounded to half precision
    first, and the values are chosen for what it then is. Raises CheckpointError for weights that
    are not finite or too large for it.
    """
    parts = torch.split(weight, _ROWS_AT_ONCE)
    return GgufBlocks(kind, torch.cat([_QUANTIZERS[kind](_groups(part)) for part in parts]))


def _groups(weight: Tensor) -> Tensor:
    """float32[rows, k / 32, 32]."""
    padded = F.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE))
    return padded.reshape(len(weight), -1, GROUP_SIZE)


def _to_q8_0(groups: Tensor) -> Tensor:
    scale = _to_half(groups.abs().amax(-1, keepdim=True) / 127)
    values = _divide(groups, scale).clamp(-127, 127)
    return torch.cat((_bytes_of(scale), values.to(torch.int8).view(torch.uint8)), dim=-1)


def _to_q4_0(groups: Tensor) -> Tensor:
    """Values reach from -8 to 7: the side with the largest magnitude gets the -8."""
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = _to_half(farthest / -8)
    values = (_divide(groups, scale) + 8).clamp(0, 15)
    return torch.cat((_bytes_of(scale), _in_halves(values)), dim=-1)


def _to_q4_1(groups: Tensor) -> Tensor:
    minimum, maximum = groups.aminmax(dim=-1, keepdim=True)
    scale, start = _to_half((maximum - minimum) / 15), _to_half(minimum)
    values = _divide(groups - start.float(), scale).clamp(0, 15)
    return torch.cat((_bytes_of(scale), _bytes_of(start), _in_halves(values)), dim=-1)


def _to_half(value: Tensor) -> Tensor:
    half = value.to(torch.float16)
    if not half.isfinite().all():
        raise CheckpointError("weights that are not finite, or beyond fp16, cannot be quantized")
    return half


def _divide(groups: Tensor, scale: Tensor) -> Tensor:
    """groups / scale, rounded; 0 where the scale is (a group that varies too little for fp16)."""
    return torch.where(scale == 0, 0.0, groups / scale.float()).round()


def _in_halves(values: Tensor) -> Tensor:
    low, high = values.to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def _bytes_of(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.uint8)


_QUANTIZERS: dict[QuantizedKind, Callable[[Tensor], Tensor]] = {
    "q8_0": _to_q8_0,
    "q4_0": _to_q4_0,
    "q4_1": _to_q4_1,
}
