"""ReferenceAttention: what NativeAttention does, written out in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv_pools import KvPool
from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.runner import PackedInputs
from inflight.model.torch_attention import TorchAttention
from inflight.native.attention import LayerRules


class ReferenceAttention:
    """Norms of queries and keys, rope, KV write and paged attention; see ``NativeAttention``."""

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        layer = KvLayer(num_kv_heads=num_kv_heads, key_dim=head_dim, value_dim=head_dim)
        self._layers = (layer,) * num_layers
        self._paged = TorchAttention(dtype, torch.device("cpu"))
        self._positions = torch.empty(0, dtype=torch.int64)

    @property
    def storage(self) -> Sequence[tuple[Tensor, ...]]:
        """The live tensors of each layer, as ``TorchAttention`` has them."""
        return self._paged.storage

    @property
    def kv_bytes_per_token(self) -> int:
        return self._paged.kv_bytes_per_token(self._layers)

    def allocate(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        self._paged.allocate(
            self._layers,
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            further_pools=further_pools,
        )

    def plan(self, rows: PackedInputs) -> None:
        self._paged.begin_iteration(rows)
        self._positions = torch.from_numpy(rows.position_ids)

    def attend(self, layer: int, rules: LayerRules, qkv: Tensor, out: Tensor) -> None:
        num_kv_heads = self._layers[layer].num_kv_heads
        heads = qkv.float().view(len(qkv), -1, rules.head_dim)
        query, key, value = torch.split(heads, [rules.num_heads, num_kv_heads, num_kv_heads], dim=1)
        query = self._turned(_normalised(query, rules.q_norm, rules), rules)
        key = self._turned(_normalised(key, rules.k_norm, rules), rules)
        attended = self._paged.attend(
            layer,
            query,
            key,
            value,
            AttentionRules(
                scale=rules.scale,
                sliding_window=rules.sliding_window,
                softcap=rules.softcap,
                sinks=rules.sinks,
            ),
        )
        out.copy_(attended.flatten(1))

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        self._paged.copy_blocks(source_ids, target_ids, pool)

    @property
    def block_format(self) -> str:
        return self._paged.block_format

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        return self._paged.read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self._paged.write_blocks(block_ids, contents)

    def _turned(self, heads: Tensor, rules: LayerRules) -> Tensor:
        """[T, heads, head_dim] with rope applied."""
        if rules.cos_sin is None:
            return heads
        cosines, sines = rules.cos_sin[self._positions][:, None].chunk(2, dim=-1)
        rotary_dim = rules.cos_sin.shape[1]
        first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        return torch.cat(
            (
                first * cosines - second * sines,
                second * cosines + first * sines,
                heads[..., rotary_dim:],
            ),
            dim=-1,
        )


def _normalised(heads: Tensor, weight: Tensor | None, rules: LayerRules) -> Tensor:
    """RMSNorm of [T, heads, head_dim] over as many numbers as there are weights."""
    if weight is None:
        return heads
    spans = heads.reshape(len(heads), -1, len(weight))
    factor = torch.rsqrt(spans.square().mean(-1, keepdim=True) + rules.norm_epsilon)
    normalised: Tensor = spans * factor * (weight + rules.norm_offset)
    return normalised.view_as(heads)
