"""The operations between the linears: norms, activations, copies, embedding; native and in torch.

``NativeElementwise`` and ``TorchElementwise`` have the same methods and promise the same results
up to rounding. All tensors are contiguous, on the CPU, and of widths that are multiples of 16;
"fp32 or bf16" is each tensor's own choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional

from inflight.native.library import Float, FunctionSource, Int, Pointer

WIDTH_MULTIPLE = 16


class Activation(IntEnum):
    """The numbers are those of src/elementwise.h."""

    SILU = 0
    GELU_TANH = 1


PlainActivation = Literal["relu", "relu2", "gelu", "gelu_tanh"]
"""Of an MLP without a gate; relu2 is the square of relu. The numbers of src/elementwise.h are their
places here."""

_PLAIN: Mapping[PlainActivation, int] = {
    name: number for number, name in enumerate(get_args(PlainActivation))
}


class _Target(IntEnum):
    """The numbers are those of src/elementwise.h."""

    FLOAT = 0
    BF16 = 1
    ADDED_TO_FLOAT = 2


class Elementwise(Protocol):
    def rms_norm(
        self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, accumulate: bool = False
    ) -> None:
        """out [T, H], fp32 or bf16, = x / sqrt(mean(x^2) + epsilon) * weight, of fp32[T, H] and
        fp32[H]; with ``accumulate`` that is added to ``out``, fp32."""
        ...

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        out: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        """As ``rms_norm`` of x - mean(x), plus ``bias`` fp32[H]."""
        ...

    def copy(self, x: Tensor, out: Tensor) -> None:
        """out [T, H], fp32 or bf16, = x, fp32[T, H]."""
        ...

    def activate(self, data: Tensor, activation: PlainActivation) -> None:
        """data [T, I], fp32 or bf16, = activation(data), in place."""
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
        self._norm = library.function(
            "inflight_norm", *[Pointer] * 4, *[Int] * 2, Float, *[Int] * 2
        )
        self._copy = library.function("inflight_copy", *[Pointer] * 2, *[Int] * 3)
        self._activate = library.function("inflight_activate", Pointer, *[Int] * 4)
        self._gated_product = library.function("inflight_gated_product", *[Pointer] * 2, *[Int] * 5)
        self._embed = library.function(
            "inflight_embed", Pointer, Int, *[Pointer] * 2, *[Int] * 2, Float, Int, result=Int
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, accumulate: bool = False
    ) -> None:
        self._normalize(x, weight, None, epsilon, out, False, accumulate)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        out: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        self._normalize(x, weight, bias, epsilon, out, True, accumulate)

    def _normalize(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        out: Tensor,
        is_centered: bool,
        accumulate: bool,
    ) -> None:
        rows, width = x.shape
        is_bf16 = out.dtype is torch.bfloat16
        assert width % WIDTH_MULTIPLE == 0 and not (is_bf16 and accumulate)
        self._norm(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            epsilon,
            is_centered,
            _Target.ADDED_TO_FLOAT if accumulate else _Target(is_bf16),
        )

    def copy(self, x: Tensor, out: Tensor) -> None:
        rows, width = x.shape
        assert width % WIDTH_MULTIPLE == 0
        self._copy(x.data_ptr(), out.data_ptr(), rows, width, out.dtype is torch.bfloat16)

    def activate(self, data: Tensor, activation: PlainActivation) -> None:
        rows, width = data.shape
        assert width % WIDTH_MULTIPLE == 0
        is_bf16 = data.dtype is torch.bfloat16
        self._activate(data.data_ptr(), rows, width, _PLAIN[activation], is_bf16)

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
        self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, accumulate: bool = False
    ) -> None:
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        _put(x * factor * weight, out, accumulate)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        out: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        _put(functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon), out, accumulate)

    def copy(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def activate(self, data: Tensor, activation: PlainActivation) -> None:
        if activation == "relu":
            data.relu_()
        elif activation == "relu2":
            data.relu_().square_()
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            data.copy_(functional.gelu(data, approximate=approximate))

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


def _put(value: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out += value
    else:
        out.copy_(value)


def rope_table(
    inverse_frequencies: Tensor, num_positions: int, attention_scaling: float = 1.0
) -> Tensor:
    """fp32[num_positions, rotary_dim] as ``attention.LayerRules`` takes it: the cosines and then
    the sines of position * inverse_frequencies[rotary_dim / 2], times ``attention_scaling``."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies.float())
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_scaling).contiguous()
