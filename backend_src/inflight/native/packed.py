"""PackedLinear: the weights of one linear in the order in which the kernels read them.

The bytes are the layout that ``src/linear.h`` describes: panels of 32 columns of y, each whole in
memory. They hold no pointers and may lie in a file that is mapped; at a multiple of 64 bytes the
kernels read them fastest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.native.gguf_blocks import (
    BLOCK_FORMATS,
    GROUP_SIZE,
    HALF_BYTES,
    GgufBlocks,
    QuantizedKind,
)
from inflight.native.quantize import quantize

FloatKind = Literal["f32", "bf16"]
WeightKind = Literal["f32", "bf16", "q8_0", "q4_0", "q4_1"]
WEIGHT_KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
"""In the order of ``WeightKind`` in ``src/linear.h``."""

PANEL_COLUMNS = 32
_FLOAT_DTYPES: dict[FloatKind, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16}


class _NativeForm(ctypes.Structure):
    """``PackedLinear`` in ``src/linear.cpp``."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("panels_per_task", ctypes.c_int64),
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedLinear:
    """W [n, k] and its bias; made by ``pack_linear``, ``pack_blocks`` or ``pack_gate_up``.

    Raises CheckpointError when the sizes make no sense together: what is read from a file need not
    be what was written.
    """

    kind: WeightKind
    n: int
    """Columns of y; of a gate and up the columns of each."""
    k: int
    is_gate_up: bool
    """Panels of a gate and of its up projection in turn, so that one task meets both."""
    data: Tensor
    """uint8[packed_bytes(...)]."""
    bias: Tensor | None = None
    """float32[columns of all panels] in the order of the panels, or None."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise CheckpointError(f"packed weights of {self.n} x {self.k} are none")
        size = packed_bytes(self.kind, self.n, self.k, is_gate_up=self.is_gate_up)
        if self.data.dtype != torch.uint8 or self.data.shape != (size,):
            raise CheckpointError(
                f"packed weights {self.kind} of {self.n} x {self.k} are {size} bytes, not "
                f"{self.data.numel()} of {self.data.dtype}"
            )
        columns = _num_panels(self.n, self.is_gate_up) * PANEL_COLUMNS
        if self.bias is not None and (
            self.bias.dtype != torch.float32 or self.bias.shape != (columns,)
        ):
            raise CheckpointError(f"a packed bias is {columns} numbers of fp32")
        assert self.data.is_contiguous() and (self.bias is None or self.bias.is_contiguous())

    @cached_property
    def native_address(self) -> int:
        """Where the C functions find all this, as long as this object lives."""
        return ctypes.addressof(self._native)

    @cached_property
    def _native(self) -> _NativeForm:
        return _NativeForm(
            panels=self.data.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            kind=WEIGHT_KINDS.index(self.kind),
            columns=self.n,
            k=self.k,
            panels_per_task=2 if self.is_gate_up else 1,
        )

    def unpack(self) -> Tensor:
        """float32[n, k], exact; of a gate and up float32[2n, k], all gate rows first."""
        panels = self.data.view(_num_panels(self.n, self.is_gate_up), -1)
        if self.kind == "f32" or self.kind == "bf16":
            rows = _unpack_float(panels, _FLOAT_DTYPES[self.kind])
        else:
            rows = _unpack_blocks(panels, self.kind).dequantize()
        return self._in_order(rows)[:, : self.k]

    def pieces(self, columns: int) -> Iterator[PackedLinear]:
        """The same linear cut into ``columns`` of y each, a multiple of 32: views of its memory."""
        assert columns % PANEL_COLUMNS == 0
        num_panels = _num_panels(self.n, self.is_gate_up)
        panels = self.data.view(num_panels, -1)
        biases = None if self.bias is None else self.bias.view(num_panels, PANEL_COLUMNS)
        for start in range(0, self.n, columns):
            n = min(columns, self.n - start)
            first = _num_panels(start, self.is_gate_up)
            own = slice(first, first + _num_panels(n, self.is_gate_up))
            yield PackedLinear(
                kind=self.kind,
                n=n,
                k=self.k,
                is_gate_up=self.is_gate_up,
                data=panels[own].flatten(),
                bias=None if biases is None else biases[own].flatten(),
            )

    def unpack_bias(self) -> Tensor | None:
        """float32[n], of a gate and up float32[2n] in the order of ``unpack``."""
        return None if self.bias is None else self._in_order(self.bias)

    def _in_order(self, rows: Tensor) -> Tensor:
        if not self.is_gate_up:
            return rows[: self.n]
        gate, up = rows.reshape(-1, 2, PANEL_COLUMNS, *rows.shape[1:]).unbind(1)
        return torch.cat((gate.flatten(0, 1)[: self.n], up.flatten(0, 1)[: self.n]))


def packed_bytes(kind: WeightKind, n: int, k: int, *, is_gate_up: bool) -> int:
    """Size of ``PackedLinear.data``; n and k are padded to multiples of 32."""
    if kind == "f32" or kind == "bf16":
        group_bytes = GROUP_SIZE * PANEL_COLUMNS * _FLOAT_DTYPES[kind].itemsize
    else:
        group_bytes = BLOCK_FORMATS[kind].block_bytes * PANEL_COLUMNS
    return _num_panels(n, is_gate_up) * -(-k // GROUP_SIZE) * group_bytes


def pack_linear(weight: Tensor, bias: Tensor | None, kind: WeightKind) -> PackedLinear:
    """W [n, k] and bias [n] of any float dtypes, rounded or quantized to ``kind``.

    Raises CheckpointError for weights that cannot be quantized (``quantize``).
    """
    n, k = weight.shape
    data = _pack_rows(weight, kind)
    packed_bias = None if bias is None else _pad_rows(bias.float())
    return PackedLinear(kind=kind, n=n, k=k, is_gate_up=False, data=data, bias=packed_bias)


def pack_blocks(blocks: GgufBlocks, bias: Tensor | None = None) -> PackedLinear:
    """The blocks' own values in another order: nothing is quantized again."""
    return PackedLinear(
        kind=blocks.kind,
        n=blocks.n,
        k=blocks.k,
        is_gate_up=False,
        data=_pack_quantized(blocks),
        bias=None if bias is None else _pad_rows(bias.float()),
    )


def pack_gate_up(
    gate: Tensor,
    up: Tensor,
    kind: WeightKind,
    biases: tuple[Tensor, Tensor] | None = None,
) -> PackedLinear:
    """A gate and its up projection, both [n, k], for ``gate_up`` of the ops."""
    n, k = gate.shape
    return PackedLinear(
        kind=kind,
        n=n,
        k=k,
        is_gate_up=True,
        data=_pack_rows(_interleave(gate, up), kind),
        bias=None if biases is None else _interleave(biases[0].float(), biases[1].float()),
    )


def pack_gate_up_blocks(gate: GgufBlocks, up: GgufBlocks) -> PackedLinear:
    """As ``pack_gate_up``. Raises CheckpointError when the two differ in kind or size."""
    if (gate.kind, gate.n, gate.k) != (up.kind, up.n, up.k):
        raise CheckpointError(f"a gate of {gate.kind} and an up projection of {up.kind} differ")
    both = GgufBlocks(gate.kind, _interleave(gate.blocks, up.blocks))
    data = _pack_quantized(both)
    return PackedLinear(kind=gate.kind, n=gate.n, k=gate.k, is_gate_up=True, data=data)


def _num_panels(n: int, is_gate_up: bool) -> int:
    return -(-n // PANEL_COLUMNS) * (2 if is_gate_up else 1)


def _pad_rows(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % PANEL_COLUMNS
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """32 rows of the gate, 32 of up, and so on; both padded to multiples of 32 rows."""
    shape = (-1, PANEL_COLUMNS, *gate.shape[1:])
    panels = [_pad_rows(rows).reshape(shape) for rows in (gate, up)]
    return torch.stack(panels, dim=1).flatten(0, 2)


def _pack_rows(weight: Tensor, kind: WeightKind) -> Tensor:
    if kind == "f32" or kind == "bf16":
        return _pack_float(weight, _FLOAT_DTYPES[kind])
    return _pack_quantized(quantize(weight, kind))


def _pack_float(weight: Tensor, dtype: torch.dtype) -> Tensor:
    padded = _pad_rows(F.pad(weight.to(dtype), (0, -weight.shape[1] % GROUP_SIZE)))
    together = 4 // dtype.itemsize
    panels = padded.reshape(-1, PANEL_COLUMNS, padded.shape[1] // together, together)
    return panels.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def _unpack_float(panels: Tensor, dtype: torch.dtype) -> Tensor:
    steps = panels.view(dtype).reshape(len(panels), -1, PANEL_COLUMNS, 4 // dtype.itemsize)
    return steps.transpose(1, 2).flatten(2).flatten(0, 1).float()


def _pack_quantized(blocks: GgufBlocks) -> Tensor:
    """Each group of a panel: its values four bytes at a time, then scales, then minima."""
    header = BLOCK_FORMATS[blocks.kind].header_bytes
    rows = _pad_rows(blocks.blocks)
    panels = rows.reshape(-1, PANEL_COLUMNS, *rows.shape[1:]).transpose(1, 2)
    halves, values = panels[..., :header], panels[..., header:]
    return torch.cat((_by_column(values, 4), _by_column(halves, HALF_BYTES)), dim=-1).flatten()


def _by_column(panels: Tensor, unit: int) -> Tensor:
    """[panels, groups, 32, bytes] -> [panels, groups, 32 * bytes]: `unit` bytes of each column."""
    return panels.reshape(*panels.shape[:3], -1, unit).transpose(2, 3).flatten(2)


def _unpack_blocks(panels: Tensor, kind: QuantizedKind) -> GgufBlocks:
    form = BLOCK_FORMATS[kind]
    groups = panels.reshape(len(panels), -1, form.block_bytes * PANEL_COLUMNS)
    values, halves = groups.tensor_split([form.value_bytes * PANEL_COLUMNS], dim=2)
    parts = (_by_block(halves, HALF_BYTES), _by_block(values, 4))
    return GgufBlocks(kind, torch.cat(parts, dim=-1).transpose(1, 2).flatten(0, 1))


def _by_block(groups: Tensor, unit: int) -> Tensor:
    """Undoes ``_by_column``."""
    steps = groups.reshape(*groups.shape[:2], -1, PANEL_COLUMNS, unit)
    return steps.transpose(2, 3).flatten(3)
