"""KvHeads: the K, or the V, of one layer as the reference attention stores it."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.model.row_groups import RowGroup
from inflight.native.kv_storage import SCALE_DTYPE, quantize_heads


class KvHeads:
    """[num_kv_heads, num_blocks, tokens_per_block, dim]: the blocks of one head lie whole, so a
    gather moves whole blocks and what it returns needs no transpose. int8 has scales of the same
    shape without dim beside."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Not filled: nobody reads a slot that was not written. Raises RuntimeError or MemoryError
        when there is not enough memory."""
        self._elements = torch.empty(shape, dtype=dtype, device=device)
        self._scales: Tensor | None = None
        if dtype is torch.int8:
            self._scales = torch.empty(shape[:-1], dtype=SCALE_DTYPE, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The live tensors."""
        return (self._elements,) if self._scales is None else (self._elements, self._scales)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """``slots``: int64[T]; ``rows``: [T, num_kv_heads, dim]."""
        heads = rows.transpose(0, 1)
        if self._scales is not None:
            heads, scales = quantize_heads(heads)
            self._scales.flatten(1, 2).index_copy_(1, slots, scales)
        self._elements.flatten(1, 2).index_copy_(1, slots, heads.to(self._elements.dtype))

    def gather(self, group: RowGroup, sliding_window: int | None) -> Tensor:
        """[num_kv_heads * S, L, dim] for the keys of a group, with zeros for those that none of a
        sequence's rows sees: 0 times a NaN left by somebody else would be a NaN. fp32 from int8,
        else as stored."""
        num_kv_heads, num_blocks, _, dim = self._elements.shape
        blocks = group.block_rows(num_kv_heads, num_blocks)
        gathered = self._elements.flatten(0, 1).index_select(0, blocks)
        if self._scales is not None:
            scales = self._scales.flatten(0, 1).index_select(0, blocks)
            gathered = gathered.float() * scales.unsqueeze(-1)
        gathered.view(num_kv_heads, -1, dim).index_fill_(1, group.unseen_keys(sliding_window), 0.0)
        return gathered.view(num_kv_heads * group.num_sequences, group.num_keys, dim)

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """int64 block ids, as if all sources were read before any write."""
        for tensor in self.tensors:
            tensor.index_copy_(1, target, tensor.index_select(1, source))
