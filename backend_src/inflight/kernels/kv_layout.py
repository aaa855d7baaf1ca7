"""The KV storage of the kernels: one tensor for all layers.

[num_layers, 2, num_blocks, num_kv_heads, tokens_per_block, head_dim], contiguous; K at 0 and V at 1
of axis 1. The keys of one head and block lie side by side, so attention reads whole runs, and a
block of a layer is one run for copies. ``storage[layer]`` is what the kernels call ``cache``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUPPORTED_TOKENS_PER_BLOCK = (16, 32, 64, 128)
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, tokens_per_block: int, device: torch.device) -> Tensor:
        """The storage, all zeros. Our kernels never let a slot that was not written into a result;
        a library that multiplies what it masks by 0 would let NaN in.

        Raises RuntimeError (torch.OutOfMemoryError on a GPU) when there is no room.
        """
        assert tokens_per_block in SUPPORTED_TOKENS_PER_BLOCK
        size = (
            self.num_layers, 2, num_blocks, self.num_kv_heads, tokens_per_block, self.head_dim
        )  # fmt: skip
        return torch.zeros(size, dtype=self.dtype, device=device)


def unsupported_reason(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve heads of this shape stored in ``dtype``; None: they can."""
    if dtype not in SUPPORTED_DTYPES:
        return f"the Triton kernels store K and V in fp16, bf16 and fp32, not in {dtype}"
    if head_dim != value_dim:
        return f"the Triton kernels need K and V heads of one size, not {head_dim} and {value_dim}"
    if head_dim % HEAD_DIM_MULTIPLE or not HEAD_DIM_MULTIPLE <= head_dim <= MAX_HEAD_DIM:
        return (
            f"the Triton kernels take head sizes of {HEAD_DIM_MULTIPLE}, {2 * HEAD_DIM_MULTIPLE}, "
            f".. {MAX_HEAD_DIM}, not {head_dim}"
        )
    return None
