"""AttentionPool: the KV storage of the layers that share a pool, and their plan of an iteration."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from inflight.native.kv_storage import KV_KINDS, bytes_per_head, no_memory, untouched_memory
from inflight.native.library import Int, NativeLibrary, Pointer

# The parameters of the C function in src/attention.cpp.
_PLAN = ("inflight_attention_plan", Pointer, Int, Int, Pointer, Pointer, Pointer, Int, Pointer,
         Pointer)  # fmt: skip


class PackedRows(Protocol):
    """The arrays of ``model.runner.PackedInputs`` that attention needs, as described there."""

    @property
    def position_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]: ...
    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int32]: ...
    @property
    def context_lens(self) -> npt.NDArray[np.int32]: ...
    @property
    def block_tables(self) -> npt.NDArray[np.int32]: ...
    def of_pool(self, pool: int) -> PackedRows: ...


class LayerPool(Protocol):
    """``api.kv_pools.KvPool``, as far as storage goes."""

    @property
    def layers(self) -> Sequence[int]: ...
    @property
    def num_blocks(self) -> int: ...


class AttentionPlan:
    """The rows of an iteration, for layers whose KV heads are alike; made once, used from one
    thread."""

    def __init__(
        self,
        library: NativeLibrary,
        *,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_block: int,
        dtype: torch.dtype,
    ) -> None:
        """``dtype``: of the storage, a key of KV_KINDS."""
        make = library.function("inflight_attention_new", *[Int] * 4, result=Pointer)
        self.handle: int = make(num_kv_heads, head_dim, tokens_per_block, KV_KINDS[dtype])
        free = library.function("inflight_attention_free", Pointer)
        weakref.finalize(self, free, self.handle)
        self._plan = library.function(*_PLAN)
        self._rows: tuple[npt.NDArray[Any], ...] = ()

    def take(self, rows: PackedRows) -> None:
        """The arrays of ``rows`` stay unchanged until the next call."""
        tables = rows.block_tables
        assert tables.strides[1] == tables.itemsize
        self._rows = (
            np.ascontiguousarray(rows.cu_seqlens_q, dtype=np.int32),
            np.ascontiguousarray(rows.context_lens, dtype=np.int32),
            tables,
            np.ascontiguousarray(rows.position_ids, dtype=np.int64),
            np.ascontiguousarray(rows.slot_mapping, dtype=np.int64),
        )
        starts, lengths, _, positions, slots = self._rows
        self._plan(
            self.handle,
            len(lengths),
            len(positions),
            starts.ctypes.data,
            lengths.ctypes.data,
            tables.ctypes.data,
            tables.strides[0] // tables.itemsize,
            positions.ctypes.data,
            slots.ctypes.data,
        )


class AttentionPool:
    """Made once; then ``plan.take`` in each iteration, before its layers attend."""

    def __init__(
        self,
        library: NativeLibrary,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        num_blocks: int,
        tokens_per_block: int,
    ) -> None:
        """``shape``: layers of the pool, KV heads, head size. Raises ConfigError when there is no
        room for the storage."""
        num_layers, num_kv_heads, head_dim = shape
        per_token = num_kv_heads * 2 * bytes_per_head(head_dim, dtype)
        self._layer_bytes = num_blocks * tokens_per_block * per_token
        block = tokens_per_block * per_token // dtype.itemsize
        try:
            self.storage = untouched_memory((num_layers, num_blocks, block), dtype)
        except MemoryError:
            raise no_memory(num_blocks, tokens_per_block, num_layers * per_token) from None
        self.plan = AttentionPlan(
            library,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tokens_per_block=tokens_per_block,
            dtype=dtype,
        )

    def address_of(self, layer: int) -> int:
        """Where the storage of the pool's layer ``layer`` begins."""
        return self.storage.data_ptr() + layer * self._layer_bytes
