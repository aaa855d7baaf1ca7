"""Rope, KV write and paged attention of one layer as a torch custom op with a fake kernel.

``torch.ops.inflight.attend`` takes all that it needs as tensors and numbers, so each layer's call
lays out the iteration's rows anew; ``NativeAttention``, which the engine uses, does so once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.native.attention import ATTEND, LayerRules, unsupported_reason
from inflight.native.attention_pool import AttentionPlan
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.kv_storage import KV_KINDS, bytes_per_head
from inflight.native.library import NativeLibrary

_SCHEMA = (
    "(Tensor qkv, Tensor(a!) kv_cache, Tensor position_ids, Tensor slot_mapping, "
    "Tensor cu_seqlens_q, Tensor context_lens, Tensor block_tables, *, int num_heads, "
    "int num_kv_heads, int tokens_per_block, float scale, Tensor? cos_sin=None, "
    "Tensor? q_norm=None, Tensor? k_norm=None, float norm_epsilon=0.0, Tensor? sinks=None, "
    "float? softcap=None, int? sliding_window=None) -> Tensor"
)


_ARRAYS = (
    ("position_ids", torch.int64, 1), ("slot_mapping", torch.int64, 1),
    ("cu_seqlens_q", torch.int32, 1), ("context_lens", torch.int32, 1),
    ("block_tables", torch.int32, 2),
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """``PackedRows`` of one pool."""

    position_ids: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]

    def of_pool(self, pool: int) -> _Rows:
        return self

    def check(self, num_blocks: int, tokens_per_block: int) -> None:
        """Raises ValueError unless the arrays fit each other and the cache."""
        counts = np.diff(self.cu_seqlens_q)
        lengths = self.context_lens
        fits = (
            len(self.cu_seqlens_q) - 1 == len(lengths) == len(self.block_tables) > 0
            and self.cu_seqlens_q[0] == 0
            and self.cu_seqlens_q[-1] == len(self.position_ids) == len(self.slot_mapping)
            and self.position_ids.min(initial=0) >= 0
            and (counts > 0).all()
            and (counts <= lengths).all()
            and lengths.max() <= self.block_tables.shape[1] * tokens_per_block
        )
        if not fits:
            raise ValueError("rows, sequences and block tables do not fit each other")
        used = -(-lengths // tokens_per_block)
        blocks = [table[:n] for table, n in zip(self.block_tables, used, strict=True)]
        in_tables, slots = np.concatenate(blocks), self.slot_mapping
        for indices, end in ((in_tables, num_blocks), (slots, num_blocks * tokens_per_block)):
            if indices.min() < 0 or indices.max() >= end:
                raise ValueError(f"block or slot outside of the KV cache of {num_blocks} blocks")


def _rows(*arrays: Tensor) -> _Rows:
    for array, (name, dtype, dims) in zip(arrays, _ARRAYS, strict=True):
        if array.dtype is not dtype or array.dim() != dims:
            raise ValueError(f"{name}: {dtype} of {dims} dimensions is wanted")
    return _Rows(*(array.contiguous().numpy() for array in arrays))


class _Attend:
    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._attend = library.function(*ATTEND)
        self._plan = cache(partial(AttentionPlan, library))
        self._lock = threading.Lock()
        """A plan is of one call at a time."""

    def __call__(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        position_ids: Tensor,
        slot_mapping: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        tokens_per_block: int,
        **rules: Any,
    ) -> Tensor:
        head_dim = _head_dim(qkv, num_heads, num_kv_heads)
        _check_cache(kv_cache, num_kv_heads * head_dim, num_kv_heads, tokens_per_block)
        rows = _rows(position_ids, slot_mapping, cu_seqlens_q, context_lens, block_tables)
        if len(rows.position_ids) != len(qkv):
            raise ValueError(f"{len(rows.position_ids)} positions for {len(qkv)} rows")
        rows.check(len(kv_cache), tokens_per_block)
        layer = LayerRules(num_heads=num_heads, head_dim=head_dim, **rules)
        if layer.max_positions is not None and rows.position_ids.max() >= layer.max_positions:
            raise ValueError(f"cos_sin has {layer.max_positions} positions")
        qkv, out = qkv.contiguous(), qkv.new_empty(len(qkv), num_heads * head_dim)
        is_bf16 = qkv.dtype is torch.bfloat16
        with self._lock:
            plan = self._plan(
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                tokens_per_block=tokens_per_block,
                dtype=kv_cache.dtype,
            )
            plan.take(rows)
            self._attend(
                plan.handle, layer.address, qkv.data_ptr(), is_bf16,
                kv_cache.data_ptr(), out.data_ptr(), is_bf16,
            )  # fmt: skip
        return out


@cache
def register_attend(library: NativeLibrary) -> None:
    """Makes ``torch.ops.inflight.attend`` known to torch, once in a process.

    It returns [T, num_heads * head_dim] in the dtype of ``qkv`` [T, (num_heads + 2 * num_kv_heads)
    * head_dim], fp32 or bf16, and writes the rows' K and V into ``kv_cache`` [num_blocks, elements
    of a block], one layer of ``NativeAttention.storage``. The index tensors are the arrays of
    ``model.runner.PackedInputs``, int64[T] twice and then int32; what follows are the fields of
    ``LayerRules``. Raises ValueError for shapes, dtypes and indices that do not fit.
    """
    torch.library.define("inflight::attend", _SCHEMA)
    torch.library.impl("inflight::attend", "CPU", _Attend(library))
    torch.library.register_fake("inflight::attend", _fake_attend)


def _head_dim(qkv: Tensor, num_heads: int, num_kv_heads: int) -> int:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads for {num_kv_heads} KV heads")
    head_dim, rest = divmod(qkv.shape[-1], num_heads + 2 * num_kv_heads)
    reason = unsupported_reason(head_dim=head_dim, value_dim=head_dim, dtype=qkv.dtype)
    if qkv.dim() != 2 or rest or reason is not None:
        raise ValueError(reason or f"rows of {tuple(qkv.shape[1:])}")
    return head_dim


def _check_cache(kv_cache: Tensor, width: int, num_kv_heads: int, tokens_per_block: int) -> None:
    if kv_cache.dtype not in KV_KINDS or tokens_per_block not in SUPPORTED_TOKENS_PER_BLOCK:
        raise ValueError(f"a KV cache of {kv_cache.dtype} in blocks of {tokens_per_block} tokens")
    token = 2 * num_kv_heads * bytes_per_head(width // num_kv_heads, kv_cache.dtype)
    block = tokens_per_block * token // kv_cache.element_size()
    if kv_cache.dim() != 2 or kv_cache.shape[1] != block or not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache has to be contiguous [num_blocks, {block}]")


def _fake_attend(
    qkv: Tensor, kv_cache: Tensor, *arrays: Tensor, num_heads: int, num_kv_heads: int, **rules: Any
) -> Tensor:
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    return qkv.new_empty(qkv.shape[0], num_heads * head_dim)
