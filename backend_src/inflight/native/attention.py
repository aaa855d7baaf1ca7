"""NativeAttention: rope, KV write and paged attention over packed rows, in one native call a layer.

It owns the KV storage; ``src/attention.h`` describes its layout. Who sees whom and how scores
become weights is said in ``model/attention.py``: the two agree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.native.attention_pool import AttentionPool, LayerPool, PackedRows
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.kv_storage import KV_KINDS, bytes_per_head, read_blocks, write_blocks
from inflight.native.library import Int, NativeLibrary, Pointer

MAX_HEAD_DIM = 512
BLOCK_LAYOUT = 1
"""Of src/attention.h; to be raised with it: blocks on disk may be older."""

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)

# The parameters of the C functions in src/attention.cpp.
ATTEND = ("inflight_attention_attend", Pointer, Pointer, Pointer, Int, Pointer, Pointer, Int)
_ATTEND_HEADS = ("inflight_attention_attend_heads", *ATTEND[1:])


class _CRules(ctypes.Structure):
    """LayerRules of src/attention.h."""

    _fields_ = [
        ("num_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("norm_spans_heads", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("norm_epsilon", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
    ]


class _CHeads(ctypes.Structure):
    """Heads of src/attention.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]


@dataclass(kw_only=True, eq=False)
class LayerRules:
    """How one layer attends; made once, used in every iteration. Tensors are contiguous fp32 on the
    CPU, and do not change."""

    num_heads: int
    """Query heads; query head h reads KV head h // (num_heads / num_kv_heads)."""
    head_dim: int
    scale: float
    """Positive. This and the next three are those of ``model.attention.AttentionRules``."""
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: Tensor | None = None
    cos_sin: Tensor | None = None
    """[positions, rotary_dim], cosines in the first half of a row and sines in the second: of each
    query and key head, dimension i turns with i + rotary_dim / 2, and those from rotary_dim on stay
    as they are. None: no rope."""
    q_norm: Tensor | None = None
    """RMSNorm before rope, over each head by itself when there are head_dim weights, and over all
    heads of the row when there are num_heads * head_dim."""
    k_norm: Tensor | None = None
    """As ``q_norm``; both norms are of one kind."""
    norm_epsilon: float = 0.0
    """x becomes x / sqrt(mean(x^2) + norm_epsilon) * (weight + norm_offset)."""
    norm_offset: float = 0.0
    address: int = field(init=False, repr=False)
    """Of the C record."""
    max_positions: int | None = field(init=False)
    """Positions that the rope table has; None: any position will do."""

    def __post_init__(self) -> None:
        assert self.scale > 0
        assert self.sinks is None or self.sinks.numel() == self.num_heads
        for tensor in (self.sinks, self.cos_sin, self.q_norm, self.k_norm):
            assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        rotary_dim = 0 if self.cos_sin is None else self.cos_sin.shape[1]
        assert rotary_dim % 2 == 0 and rotary_dim <= self.head_dim
        norm_size = self.head_dim if self.q_norm is None else self.q_norm.numel()
        assert norm_size in (self.head_dim, self.num_heads * self.head_dim)
        self._c_rules = _CRules(
            num_heads=self.num_heads,
            window=self.sliding_window or 0,
            rotary_dim=rotary_dim,
            norm_spans_heads=norm_size != self.head_dim,
            sinks=_address(self.sinks),
            cos_sin=_address(self.cos_sin),
            q_norm=_address(self.q_norm),
            k_norm=_address(self.k_norm),
            scale=self.scale,
            softcap=self.softcap or 0.0,
            norm_epsilon=self.norm_epsilon,
            norm_offset=self.norm_offset,
        )
        self.address = ctypes.addressof(self._c_rules)
        self.max_positions = None if self.cos_sin is None else self.cos_sin.shape[0]


def unsupported_reason(*, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why the native attention cannot serve heads of this shape, in activations of ``dtype``; None:
    it can."""
    if dtype not in ACTIVATION_DTYPES:
        return f"native attention computes in fp32 and bf16, not in {dtype}"
    if head_dim != value_dim:
        return f"native attention needs K and V heads of one size, not {head_dim} and {value_dim}"
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"native attention takes head sizes of 16, 32, .. {MAX_HEAD_DIM}, not {head_dim}"
    return None


class NativeAttention:
    """Used from one thread: ``allocate`` once; then per iteration ``plan``, and one attend a layer.

    All layers have the same KV heads. Storage outside the sequences of an iteration is never read
    into a result, whatever it holds.
    """

    def __init__(
        self,
        library: NativeLibrary,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        """``dtype``: of the storage, a key of KV_KINDS; with bf16 and int8 also queries and weights
        are rounded to bf16 where the CPU multiplies bf16. Sums are fp32. ``unsupported_reason`` has
        to be None for the shape."""
        assert dtype in KV_KINDS
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._dtype = dtype
        self._library = library
        self._attend = library.function(*ATTEND)
        self._attend_heads = library.function(*_ATTEND_HEADS)
        self._pools: list[AttentionPool] = []
        self._layers: list[tuple[int, int]] = []
        """Of each layer, the handle of its pool and the address of its storage."""
        self._longest = self._num_tokens = 0
        self._heads = (_CHeads * 3)()

    @property
    def storage(self) -> Tensor:
        """[num_layers, num_blocks, elements of a block], the live tensor; the elements of int8 are
        bytes, and scales lie among them. Of the first pool, and its layers."""
        return self._pools[0].storage

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        num_layers, num_kv_heads, head_dim = self._shape
        return num_layers * num_kv_heads * 2 * bytes_per_head(head_dim, self._dtype)

    @property
    def block_format(self) -> str:
        """See ``ModelRunner.kv_block_format``; the layout is that of src/attention.h, the same for
        all instruction sets."""
        return f"native {BLOCK_LAYOUT} {self._dtype}"

    def allocate(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[LayerPool] = ()
    ) -> None:
        """Makes the storage, of zeros that take memory only when they are written.

        ``num_blocks``: of the first pool, that of all layers which are in none of
        ``further_pools``. ``tokens_per_block``: one of SUPPORTED_TOKENS_PER_BLOCK. Raises
        ConfigError when there is no room for it.
        """
        assert not self._pools and tokens_per_block in SUPPORTED_TOKENS_PER_BLOCK
        num_layers, num_kv_heads, head_dim = self._shape
        placed = {layer for pool in further_pools for layer in pool.layers}
        first = [layer for layer in range(num_layers) if layer not in placed]
        further = [(pool.layers, pool.num_blocks) for pool in further_pools]
        self._layers = [(0, 0)] * num_layers
        for layers, blocks in [(first, num_blocks), *further]:
            pool = AttentionPool(
                self._library,
                (len(layers), num_kv_heads, head_dim),
                self._dtype,
                num_blocks=blocks,
                tokens_per_block=tokens_per_block,
            )
            for number, layer in enumerate(layers):
                self._layers[layer] = (pool.plan.handle, pool.address_of(number))
            self._pools.append(pool)

    def plan(self, rows: PackedRows) -> None:
        """Takes the rows of an iteration, whose arrays stay unchanged until the next plan."""
        self._num_tokens = len(rows.position_ids)
        self._longest = int(rows.context_lens.max())
        for number, pool in enumerate(self._pools):
            pool.plan.take(rows.of_pool(number))

    def attend(self, layer: int, rules: LayerRules, qkv: Tensor, out: Tensor) -> None:
        """One layer on the fused projection, contiguous [T, (num_heads + 2 * num_kv_heads) *
        head_dim], fp32 or bf16: the query heads of a row, then its key heads, then its value heads.
        ``out``, contiguous [T, num_heads * head_dim], fp32 or bf16, is overwritten."""
        _, num_kv_heads, head_dim = self._shape
        width = (rules.num_heads + 2 * num_kv_heads) * head_dim
        assert qkv.numel() == self._num_tokens * width and qkv.is_contiguous()
        self._call(self._attend, layer, rules, qkv.data_ptr(), qkv.dtype, out)

    def attend_heads(
        self, layer: int, rules: LayerRules, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        """As ``attend`` with query [T, num_heads, head_dim], key and value [T, num_kv_heads,
        head_dim] of one dtype. The elements of a head lie side by side, the heads anywhere."""
        _, num_kv_heads, head_dim = self._shape
        assert query.shape == (self._num_tokens, rules.num_heads, head_dim)
        assert key.shape == value.shape == (self._num_tokens, num_kv_heads, head_dim)
        for heads, tensor in zip(self._heads, (query, key, value), strict=True):
            assert tensor.stride(2) == 1 and tensor.dtype == query.dtype
            heads.data = tensor.data_ptr()
            heads.row_stride, heads.head_stride = tensor.stride(0), tensor.stride(1)
        heads_address = ctypes.addressof(self._heads)
        self._call(self._attend_heads, layer, rules, heads_address, query.dtype, out)

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        """Copies whole blocks in all layers of a pool, as if all sources were read before any
        write."""
        source = torch.from_numpy(source_ids.astype(np.int64))
        target = torch.from_numpy(target_ids.astype(np.int64))
        storage = self._pools[pool].storage
        storage.index_copy_(1, target, storage.index_select(1, source))

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """uint8[n, bytes of a block], all layers, which share one pool."""
        assert len(self._pools) == 1
        return read_blocks((self.storage,), block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: npt.NDArray[np.uint8]
    ) -> None:
        """What ``read_blocks`` gave, into other blocks."""
        assert len(self._pools) == 1
        write_blocks((self.storage,), block_ids, contents)

    def _call(
        self,
        function: Callable[..., Any],
        layer: int,
        rules: LayerRules,
        inputs: int,
        dtype: torch.dtype,
        out: Tensor,
    ) -> None:
        _, num_kv_heads, head_dim = self._shape
        assert rules.head_dim == head_dim and rules.num_heads % num_kv_heads == 0
        assert dtype in ACTIVATION_DTYPES and out.dtype in ACTIVATION_DTYPES and out.is_contiguous()
        assert out.numel() == self._num_tokens * rules.num_heads * head_dim
        assert rules.max_positions is None or self._longest <= rules.max_positions
        handle, storage_address = self._layers[layer]
        function(
            handle,
            rules.address,
            inputs,
            dtype is torch.bfloat16,
            storage_address,
            out.data_ptr(),
            out.dtype is torch.bfloat16,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
