"""NativeLinear and TorchLinear: y = x W^T with packed weights, and what is fused with it."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native.library import FunctionSource, Int, Pointer
from inflight.native.packed import PackedLinear

Activation = Literal["silu", "gelu_tanh"]


class LinearOps(Protocol):
    """x is float32 or bfloat16 [T, k], y (``out``) float32 or bfloat16; both are contiguous."""

    def __call__(
        self, x: Tensor, packed: PackedLinear, out: Tensor, *, accumulate: bool = False
    ) -> None:
        """out [T, n] = x W^T + bias; with ``accumulate`` it is added to ``out``."""

    def gate_up(self, x: Tensor, packed: PackedLinear, out: Tensor, activation: Activation) -> None:
        """out [T, n] = activation(x G^T) * (x U^T), biases included."""

    def logits(self, x: Tensor, packed: PackedLinear, out: Tensor) -> None:
        """out float32[R, n], of the rows that sample."""

    def argmax(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """int32[R]: the column of each row's largest logit, the lowest of equal ones.

        The logits themselves are never stored. A row of NaN gives 0.
        """


PIECE_COLUMNS = 2048
"""What TorchLinear unpacks at once where it keeps nothing."""


class _Finish(IntEnum):
    """As in ``src/linear.h``."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_TANH_MUL = 3


# As in ``src/linear.h``. These are plain ints because every call passes some of them.
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1}
_NUMBERS_OF_X_AND_Y = {(x, y): 2 * _NUMBERS[x] + _NUMBERS[y] for x in _NUMBERS for y in _NUMBERS}
_STORE, _ADD = 4 * _Finish.STORE, 4 * _Finish.ADD
_ACTIVATIONS: dict[Activation, int] = {
    "silu": 4 * _Finish.SILU_MUL,
    "gelu_tanh": 4 * _Finish.GELU_TANH_MUL,
}


def call_code(x: torch.dtype, out: torch.dtype, activation: Activation | None) -> int:
    """``how`` of the C functions: out = x W^T, or with an activation that of a gate and up."""
    finish = _STORE if activation is None else _ACTIVATIONS[activation]
    return finish + _NUMBERS_OF_X_AND_Y[x, out]


class NativeLinear:
    """LinearOps in C++, with fp32 sums; may be called from several threads at once.

    Weights of bf16 meet activations rounded to bf16 (AVX-512, AMX) or as they are. Quantized ones
    meet activations of 8 bits with a scale for each 32, and a row comes out the same, bit for bit,
    however many there are. Where the CPU has AMX and rows are 32 or more (of 4-bit weights 11),
    both are rounded to bf16 instead: a row may then differ a little from what it is in a small
    company.
    """

    def __init__(self, library: FunctionSource) -> None:
        self._linear = library.function("inflight_linear", Pointer, Pointer, Int, Pointer, Int)
        self._argmax = library.function(
            "inflight_linear_argmax", Pointer, Pointer, Int, Int, Pointer
        )

    def __call__(
        self, x: Tensor, packed: PackedLinear, out: Tensor, *, accumulate: bool = False
    ) -> None:
        assert not packed.is_gate_up
        self._run(x, packed, out, _ADD if accumulate else _STORE)

    def gate_up(self, x: Tensor, packed: PackedLinear, out: Tensor, activation: Activation) -> None:
        assert packed.is_gate_up
        self._run(x, packed, out, _ACTIVATIONS[activation])

    def logits(self, x: Tensor, packed: PackedLinear, out: Tensor) -> None:
        assert out.dtype == torch.float32
        self(x, packed, out)

    def argmax(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert not packed.is_gate_up and x.is_contiguous() and x.shape[1] == packed.k
        ids = torch.empty(len(x), dtype=torch.int32)
        number = _NUMBERS[x.dtype]
        self._argmax(packed.native_address, x.data_ptr(), len(x), number, ids.data_ptr())
        return ids

    def _run(self, x: Tensor, packed: PackedLinear, out: Tensor, finish: int) -> None:
        # Sizes are compared by count alone: a call must cost a few microseconds at most.
        num_rows = x.numel() // packed.k
        assert x.numel() == num_rows * packed.k and out.numel() == num_rows * packed.n
        assert x.is_contiguous() and out.is_contiguous()
        how = finish + _NUMBERS_OF_X_AND_Y[x.dtype, out.dtype]
        self._linear(packed.native_address, x.data_ptr(), num_rows, out.data_ptr(), how)


class TorchLinear:
    """LinearOps in torch: for machines without a compiler, and for tests.

    A PackedLinear is unpacked for its use: float32 for float32 weights, bfloat16 for all others.
    """

    def __init__(self, *, keeps_unpacked: bool = True) -> None:
        """``keeps_unpacked``: what a first use has unpacked lives as long as the PackedLinear
        does; else every use unpacks anew, ``PIECE_COLUMNS`` at a time."""
        self._keeps_unpacked = keeps_unpacked
        self._unpacked: WeakKeyDictionary[PackedLinear, tuple[Tensor, Tensor | None]] = (
            WeakKeyDictionary()
        )

    def __call__(
        self, x: Tensor, packed: PackedLinear, out: Tensor, *, accumulate: bool = False
    ) -> None:
        y = self._product(x, packed)
        if accumulate:
            out += y
        else:
            out.copy_(y)

    def gate_up(self, x: Tensor, packed: PackedLinear, out: Tensor, activation: Activation) -> None:
        gate, up = self._product(x, packed).chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        torch.mul(active, up, out=out)

    def logits(self, x: Tensor, packed: PackedLinear, out: Tensor) -> None:
        self(x, packed, out)

    def argmax(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._product(x, packed).float().argmax(-1).int()

    def _product(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """[T, n]; of a gate and up [T, 2n], the gate's first."""
        if self._keeps_unpacked:
            if packed not in self._unpacked:
                self._unpacked[packed] = _unpacked(packed)
            return _times(x, *self._unpacked[packed])
        num_halves = 2 if packed.is_gate_up else 1
        products = [
            _times(x, *_unpacked(piece)).chunk(num_halves, dim=-1)
            for piece in packed.pieces(PIECE_COLUMNS)
        ]
        return torch.cat([of[half] for half in range(num_halves) for of in products], dim=-1)


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias)


def _unpacked(packed: PackedLinear) -> tuple[Tensor, Tensor | None]:
    dtype = torch.float32 if packed.kind == "f32" else torch.bfloat16
    bias = packed.unpack_bias()
    return packed.unpack().to(dtype), None if bias is None else bias.to(dtype)
