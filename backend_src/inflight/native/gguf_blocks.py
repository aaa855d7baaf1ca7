"""GgufBlocks: quantized weights in the blocks of GGUF, the form that checkpoints carry.

A block is 32 weights of one row of W [n, k] (a group), neighbours along k: a half-precision scale,
in q4_1 also a half-precision minimum, then the values. q8_0: 32 signed bytes, weight = scale *
value. q4_0 and q4_1: 16 bytes, byte i holds value i in its low half and value i + 16 in its high
half; weight = scale * (value - 8) and scale * value + minimum. (ggml's ``ggml-quants`` defines it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.errors import CheckpointError

QuantizedKind = Literal["q8_0", "q4_0", "q4_1"]

GROUP_SIZE = 32
"""Weights of a block, and activations that share a scale."""
HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class BlockFormat:
    num_halves: int
    """Half-precision numbers at the start of a block: the scale, then the minimum."""
    value_bytes: int

    @property
    def header_bytes(self) -> int:
        return self.num_halves * HALF_BYTES

    @property
    def block_bytes(self) -> int:
        return self.header_bytes + self.value_bytes


BLOCK_FORMATS: dict[QuantizedKind, BlockFormat] = {
    "q8_0": BlockFormat(1, 32),
    "q4_0": BlockFormat(1, 16),
    "q4_1": BlockFormat(2, 16),
}


@dataclass(frozen=True, slots=True, eq=False)
class GgufBlocks:
    """W [n, k] as ``blocks``: uint8[n, k / 32, block_bytes]."""

    kind: QuantizedKind
    blocks: Tensor

    @property
    def n(self) -> int:
        return self.blocks.shape[0]

    @property
    def k(self) -> int:
        return self.blocks.shape[1] * GROUP_SIZE

    @classmethod
    def from_bytes(
        cls, data: npt.NDArray[np.uint8], kind: QuantizedKind, n: int, k: int
    ) -> GgufBlocks:
        """Copies a tensor of a GGUF file, of whatever shape its bytes come in.

        Raises CheckpointError when they are not W [n, k] in blocks of ``kind``.
        """
        groups, block_bytes = k // GROUP_SIZE, BLOCK_FORMATS[kind].block_bytes
        if k % GROUP_SIZE or data.size != n * groups * block_bytes:
            raise CheckpointError(f"{data.size} bytes are no {kind} weights of {n} x {k}")
        # A copy: the array may map a file, and torch takes none that cannot be written.
        return cls(kind, torch.from_numpy(np.array(data).reshape(n, groups, block_bytes)))

    def without_rope_order(self, num_heads: int) -> GgufBlocks:
        """The rows of a query or key projection in the order of Hugging Face checkpoints.

        llama's GGUF files take the rows of a head's two halves in turn (0, d/2, 1, d/2 + 1, ...),
        for a rope that rotates neighbours; Hugging Face's rotates row i with row i + d/2. Only rows
        change place, so the weights stay what they are. Raises CheckpointError when the rows cannot
        be so many heads.
        """
        if self.n % (2 * num_heads):
            raise CheckpointError(f"{self.n} rows are not {num_heads} heads of an even size")
        pairs = self.blocks.reshape(num_heads, -1, 2, *self.blocks.shape[1:])
        return replace(self, blocks=pairs.transpose(1, 2).flatten(0, 2))

    def dequantize(self) -> Tensor:
        """float32[n, k], exact."""
        form = BLOCK_FORMATS[self.kind]
        halves = self.blocks[..., : form.header_bytes].contiguous().view(torch.float16).float()
        scale, values = halves[..., :1], self.blocks[..., form.header_bytes :]
        if self.kind == "q8_0":
            return (scale * values.view(torch.int8)).flatten(1)
        whole = torch.cat((values & 15, values >> 4), dim=-1).float()
        if self.kind == "q4_0":
            return (scale * (whole - 8)).flatten(1)
        return (scale * whole + halves[..., 1:]).flatten(1)


def stack_rows(parts: Sequence[GgufBlocks]) -> GgufBlocks:
    """The rows of all parts under each other, as of query, key and value in one projection.

    Raises CheckpointError when their kinds or sizes differ.
    """
    kinds = {part.kind for part in parts}
    if len(kinds) > 1 or len({part.k for part in parts}) > 1:
        raise CheckpointError(f"weights of one projection differ in kind or size: {sorted(kinds)}")
    return replace(parts[0], blocks=torch.cat([part.blocks for part in parts]))
