"""TorchAttention: paged attention in plain torch operations; the reference, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv_pools import KvPool
from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.kv_heads import KvHeads
from inflight.model.layer_groups import pool_of_layers
from inflight.model.row_groups import RowGroup, group_rows
from inflight.model.runner import PackedInputs
from inflight.native.kv_storage import no_memory, read_blocks, write_blocks


class TorchAttention:
    """Gathers each sequence's blocks and computes attention as the textbook writes it.

    Products are taken in the storage dtype (int8: fp32), the softmax in fp32.
    """

    supported_tokens_per_block: tuple[int, ...] = ()

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: of the storage: a floating-point one, or int8."""
        self._dtype = dtype
        self._device = device
        self._tokens_per_block = 0
        self._layers: list[tuple[KvHeads, KvHeads]] = []
        self._pool_of: list[int] = []
        """Of each layer."""
        self._num_pools = 1
        self._rows: list[tuple[Tensor, list[RowGroup]]] = []
        """Of each pool, the slots of the iteration's rows and their groups."""

    @property
    def storage(self) -> Sequence[tuple[Tensor, ...]]:
        """The live tensors of each layer: K and V; with int8 K, its scales, V and its scales."""
        return [keys.tensors + values.tensors for keys, values in self._layers]

    def kv_bytes_per_token(self, layers: Sequence[KvLayer]) -> int:
        return sum(layer.bytes_per_token(self._dtype) for layer in layers)

    def allocate(
        self,
        layers: Sequence[KvLayer],
        *,
        num_blocks: int,
        tokens_per_block: int,
        further_pools: Sequence[KvPool] = (),
    ) -> None:
        assert not self._layers
        self._pool_of = pool_of_layers(len(layers), further_pools)
        self._num_pools = 1 + len(further_pools)
        num_blocks_of = [num_blocks, *(pool.num_blocks for pool in further_pools)]

        def heads(number: int, dim: int) -> KvHeads:
            blocks = num_blocks_of[self._pool_of[number]]
            shape = (layers[number].num_kv_heads, blocks, tokens_per_block, dim)
            return KvHeads(shape, self._dtype, self._device)

        try:
            self._layers = [
                (heads(number, layer.key_dim), heads(number, layer.value_dim))
                for number, layer in enumerate(layers)
            ]
        except (RuntimeError, MemoryError):
            per_token = self.kv_bytes_per_token(layers)
            raise no_memory(num_blocks, tokens_per_block, per_token) from None
        self._tokens_per_block = tokens_per_block

    def begin_iteration(self, inputs: PackedInputs) -> None:
        self._rows = [self._rows_in(inputs.of_pool(pool)) for pool in range(self._num_pools)]

    def _rows_in(self, inputs: PackedInputs) -> tuple[Tensor, list[RowGroup]]:
        slots = torch.from_numpy(inputs.slot_mapping).to(self._device)
        return slots, group_rows(inputs, self._tokens_per_block, self._device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        keys, values = self._layers[layer]
        slots, groups = self._rows[self._pool_of[layer]]
        keys.write(slots, key)
        values.write(slots, value)
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        window = rules.sliding_window
        for group in groups:
            seen = keys.gather(group, window), values.gather(group, window)
            attended = _attend_group(group, query[group.rows], *seen, rules)
            output[group.rows] = attended.to(output.dtype)
        return output

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        source = torch.from_numpy(source_ids.astype(np.int64)).to(self._device)
        target = torch.from_numpy(target_ids.astype(np.int64)).to(self._device)
        for pair, its_pool in zip(self._layers, self._pool_of, strict=True):
            if its_pool == pool:
                for heads in pair:
                    heads.copy_blocks(source, target)

    @property
    def block_format(self) -> str:
        return f"torch 1 {self._dtype}"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        return read_blocks(self._tensors, block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        write_blocks(self._tensors, block_ids, contents)

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self.storage for tensor in layer]


def _attend_group(
    group: RowGroup, query: Tensor, keys: Tensor, values: Tensor, rules: AttentionRules
) -> Tensor:
    """query [S * M, H, D], keys [N * S, L, D], values [N * S, L, value_dim]
    -> [S * M, H, value_dim]."""
    num_heads, num_kv_heads = query.shape[1], len(keys) // group.num_sequences
    # S sequences, M rows, N KV heads of G query heads each: every bracket below is a tensor shape.
    shape = (group.num_sequences, group.num_rows, num_kv_heads, num_heads // num_kv_heads)
    query = query.view(*shape, -1).permute(2, 0, 1, 3, 4)  # [N, S, M, G, D]
    batch = query.flatten(0, 1).flatten(1, 2).to(keys.dtype)  # [N * S, M * G, D]
    scores = torch.bmm(batch, keys.transpose(1, 2)).float().mul_(rules.scale)
    weights = _weights(scores.view(*query.shape[:4], -1), group, rules)  # [N, S, M, G, L]
    output = torch.bmm(weights.view_as(scores).to(values.dtype), values)
    output = output.view(*query.shape[:4], -1).permute(1, 2, 0, 3, 4)  # [S, M, N, G, value_dim]
    return output.reshape(group.num_sequences * group.num_rows, num_heads, -1)


def _weights(scores: Tensor, group: RowGroup, rules: AttentionRules) -> Tensor:
    """Softmax over the last axis of scores [N, S, M, G, L], as AttentionRules puts it."""
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    hidden = group.hidden(rules.sliding_window)[None, :, :, None, :]
    scores = scores.masked_fill_(hidden, float("-inf"))
    if rules.sinks is None:
        return scores.softmax(-1)
    num_kv_heads, _, _, per_kv_head, num_keys = scores.shape
    sinks = rules.sinks.float().view(num_kv_heads, 1, 1, per_kv_head, 1)
    with_sinks = torch.cat((scores, sinks.expand(*scores.shape[:4], 1)), dim=-1)
    return with_sinks.softmax(-1)[..., :num_keys].contiguous()
