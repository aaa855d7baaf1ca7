"""The operations between the linears: RMSNorm, gated activations, embedding; native and in torch.

``NativeElementwise`` and ``TorchElementwise`` have the same methods and promise the same results
up to rounding. All tensors are contiguous, on the CPU, and of widths that are multiples of 16;
"fp32 or bf16" is each tensor's own choice.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from inflight.native.library import Float, FunctionSource, Int, Pointer

WIDTH_MULTIPLE = 16


class Activation(IntEnum):
    """The numbers are those of src/elementwise.h."""

    SILU = 0
    GELU_TANH = 1


class Elementwise(Protocol):
    def rms_norm(
        self,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        out: Tensor,
        *,
        delta: Tensor | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        """residual fp32[T, H] += delta fp32[T, H], in place; then out [T, H], fp32 or bf16, =
        residual / sqrt(mean(residual^2) + epsilon) * (weight fp32[H] + weight_offset)."""
        ...

    def gated_product(self, gate_up: Tensor, out: Tensor, activation: Activation) -> None:
        """gate_up [T, 2 * I], first the gates of a row and then its ups; out [T, I] =
        activation(gate) * up. Each fp32 or bf16."""
        ...

    def embed(self, table: Tensor, ids: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """out fp32[T, H] = table[ids] * scale; table [V, H] fp32 or bf16, ids int64[T].
        Raises IndexError for an id that is not in the table."""
        ...


class NativeElementwise:
    def __init__(self, library: FunctionSource) -> None:
        self._rms_norm = library.function(
            "inflight_rms_norm", *[Pointer] * 4, *[Int] * 2, *[Float] * 2, Int
        )
        self._gated_product = library.function("inflight_gated_product", *[Pointer] * 2, *[Int] * 5)
        self._embed = library.function(
            "inflight_embed", Pointer, Int, *[Pointer] * 2, *[Int] * 2, Float, Int, result=Int
        )

    def rms_norm(
        self,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        out: Tensor,
        *,
        delta: Tensor | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        rows, width = residual.shape
        assert width % WIDTH_MULTIPLE == 0
        self._rms_norm(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            epsilon,
            weight_offset,
            out.dtype is torch.bfloat16,
        )

    def gated_product(self, gate_up: Tensor, out: Tensor, activation: Activation) -> None:
        rows, width = out.shape
        assert width % WIDTH_MULTIPLE == 0 and gate_up.shape[1] == 2 * width
        self._gated_product(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            activation,
            gate_up.dtype is torch.bfloat16,
            out.dtype is torch.bfloat16,
        )

    def embed(self, table: Tensor, ids: Tensor, out: Tensor, scale: float = 1.0) -> None:
        vocab_size, width = table.shape
        assert width % WIDTH_MULTIPLE == 0
        is_bf16 = table.dtype is torch.bfloat16
        all_found = self._embed(
            table.data_ptr(),
            vocab_size,
            ids.data_ptr(),
            out.data_ptr(),
            len(ids),
            width,
            scale,
            is_bf16,
        )
        if not all_found:
            raise IndexError(f"a token id is not below {vocab_size}")


class TorchElementwise:
    def rms_norm(
        self,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        out: Tensor,
        *,
        delta: Tensor | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        if delta is not None:
            residual += delta
        factor = torch.rsqrt(residual.square().mean(-1, keepdim=True) + epsilon)
        out.copy_(residual * factor * (weight + weight_offset))

    def gated_product(self, gate_up: Tensor, out: Tensor, activation: Activation) -> None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation is Activation.SILU:
            out.copy_(functional.silu(gate) * up)
        else:
            out.copy_(functional.gelu(gate, approximate="tanh") * up)

    def embed(self, table: Tensor, ids: Tensor, out: Tensor, scale: float = 1.0) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
            raise IndexError(f"a token id is not below {len(table)}")
        out.copy_(table[ids])
        out *= scale


def rope_table(
    inverse_frequencies: Tensor, num_positions: int, attention_scaling: float = 1.0
) -> Tensor:
    """fp32[num_positions, rotary_dim] as ``attention.LayerRules`` takes it: the cosines and then
    the sines of position * inverse_frequencies[rotary_dim / 2], times ``attention_scaling``."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies.float())
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_scaling).contiguous()
