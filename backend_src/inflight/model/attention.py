"""The attention plugin: what an implementation of paged attention promises to the runners.

An implementation owns the layout of its KV storage. Everybody else sees block ids and slots: slot
``block_id * tokens_per_block + offset`` holds K and V of one token in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv_pools import KvPool
from inflight.model.runner import PackedInputs
from inflight.native.kv_storage import bytes_per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayer:
    """The K and V of one token in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """``dtype``: of the storage."""
        dims = (self.key_dim, self.value_dim)
        return self.num_kv_heads * sum(bytes_per_head(dim, dtype) for dim in dims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRules:
    """How scores become weights in one layer, in this order.

    score = scale * q.k; score = softcap * tanh(score / softcap); keys that the query does not see
    drop out; softmax, with one extra logit per head from ``sinks`` that takes weight and adds no
    value.
    """

    scale: float
    sliding_window: int | None = None
    """A query at position p sees keys at (p - sliding_window, p]; None: all at or before p."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[num_query_heads]."""


class AttentionBackend(Protocol):
    """Paged attention with its KV storage. One iteration at a time, from one thread.

    ``allocate`` once, then in each iteration ``begin_iteration`` once and ``attend`` once a layer.
    """

    @property
    def supported_tokens_per_block(self) -> tuple[int, ...]:
        """Block sizes that ``allocate`` takes; () = any."""
        ...

    def kv_bytes_per_token(self, layers: Sequence[KvLayer]) -> int:
        """Bytes of storage for one token over all layers."""
        ...

    def allocate(
        self,
        layers: Sequence[KvLayer],
        *,
        num_blocks: int,
        tokens_per_block: int,
        further_pools: Sequence[KvPool] = (),
    ) -> None:
        """Makes the storage; pools as in ``ModelRunner.allocate_kv_cache``. Raises ConfigError when
        there is not enough memory for it."""
        ...

    def begin_iteration(self, inputs: PackedInputs) -> None:
        """Takes the rows of an iteration; ``inputs`` stays unchanged until the next begin."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        """Writes the rows' K and V into their slots, then attends within each sequence.

        query [T, num_query_heads, key_dim], key [T, num_kv_heads, key_dim], value [T, num_kv_heads,
        value_dim], where query head h reads KV head h // (num_query_heads / num_kv_heads). Returns
        [T, num_query_heads, value_dim] in the dtype of ``query``. Storage outside the rows'
        sequences is never read into a result, whatever it holds (NaN included), nor are blocks
        before the sliding window of a sequence's first row.
        """
        ...

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        """Copies whole blocks in all layers of a pool, as if all sources were read before any
        write."""
        ...

    @property
    def block_format(self) -> str:
        """Changes whenever the bytes of ``read_blocks`` mean something else."""
        ...

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        """As ``ModelRunner.read_blocks``."""
        ...

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """As ``ModelRunner.write_blocks``."""
        ...
