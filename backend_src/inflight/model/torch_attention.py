"""TorchAttention: paged attention in plain torch operations; the reference, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.row_groups import RowGroup, group_rows
from inflight.model.runner import PackedInputs


class TorchAttention:
    """Gathers each sequence's blocks and computes attention as the textbook writes it.

    K and V of a layer are stored as [num_kv_heads, num_blocks, tokens_per_block, dim]: the blocks
    of one head lie whole, so a gather moves whole blocks and what it returns needs no transpose.
    Products are taken in the storage dtype, the softmax in fp32.
    """

    supported_tokens_per_block: tuple[int, ...] = ()

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tokens_per_block = 0
        self._storage: list[tuple[Tensor, Tensor]] = []
        self._slots = torch.empty(0, dtype=torch.int64)
        self._groups: list[RowGroup] = []

    @property
    def storage(self) -> Sequence[tuple[Tensor, Tensor]]:
        """K and V of each layer, the live tensors."""
        return self._storage

    def kv_bytes_per_token(self, layers: Sequence[KvLayer]) -> int:
        return self._dtype.itemsize * sum(layer.elements_per_token for layer in layers)

    def allocate(
        self, layers: Sequence[KvLayer], *, num_blocks: int, tokens_per_block: int
    ) -> None:
        assert not self._storage
        try:
            # Filled, not merely reserved: memory that the pool was promised is missed at start and
            # not in the middle of service.
            self._storage = [
                (
                    self._zeros(layer.num_kv_heads, num_blocks, tokens_per_block, layer.key_dim),
                    self._zeros(layer.num_kv_heads, num_blocks, tokens_per_block, layer.value_dim),
                )
                for layer in layers
            ]
        except (RuntimeError, MemoryError):
            size = self.kv_bytes_per_token(layers) * num_blocks * tokens_per_block
            raise ConfigError(
                f"kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache: no memory for "
                f"{num_blocks} KV blocks of {tokens_per_block} tokens ({size >> 20} MiB)"
            ) from None
        self._tokens_per_block = tokens_per_block

    def begin_iteration(self, inputs: PackedInputs) -> None:
        self._slots = torch.from_numpy(inputs.slot_mapping).to(self._device)
        self._groups = group_rows(inputs, self._tokens_per_block, self._device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        keys, values = self._storage[layer]
        keys.flatten(1, 2).index_copy_(1, self._slots, key.transpose(0, 1).to(self._dtype))
        values.flatten(1, 2).index_copy_(1, self._slots, value.transpose(0, 1).to(self._dtype))
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        for group in self._groups:
            attended = _attend_group(group, query[group.rows], keys, values, rules)
            output[group.rows] = attended.to(output.dtype)
        return output

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32]
    ) -> None:
        source = torch.from_numpy(source_ids.astype(np.int64)).to(self._device)
        target = torch.from_numpy(target_ids.astype(np.int64)).to(self._device)
        for tensor in (tensor for pair in self._storage for tensor in pair):
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _attend_group(
    group: RowGroup, query: Tensor, keys: Tensor, values: Tensor, rules: AttentionRules
) -> Tensor:
    """query [S * M, H, D], storage of one layer -> [S * M, H, value_dim]."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[0]
    # S sequences, M rows, N KV heads of G query heads each: every bracket below is a tensor shape.
    shape = (group.num_sequences, group.num_rows, num_kv_heads, num_heads // num_kv_heads)
    query = query.view(*shape, -1).permute(2, 0, 1, 3, 4)  # [N, S, M, G, D]
    batch = query.flatten(0, 1).flatten(1, 2).to(keys.dtype)  # [N * S, M * G, D]
    gathered_keys = _gather(group, keys)  # [N * S, L, D]
    gathered_values = _gather(group, values)
    # Their weight is 0, but 0 times a NaN left by somebody else is a NaN.
    gathered_values.view(num_kv_heads, -1, values.shape[-1]).index_fill_(
        1, group.undefined_keys, 0.0
    )

    scores = torch.bmm(batch, gathered_keys.transpose(1, 2)).float().mul_(rules.scale)
    weights = _weights(scores.view(*query.shape[:4], -1), group, rules)  # [N, S, M, G, L]
    output = torch.bmm(weights.view_as(scores).to(values.dtype), gathered_values)
    output = output.view(*query.shape[:4], -1).permute(1, 2, 0, 3, 4)  # [S, M, N, G, value_dim]
    return output.reshape(group.num_sequences * group.num_rows, num_heads, -1)


def _gather(group: RowGroup, storage: Tensor) -> Tensor:
    num_kv_heads, num_blocks, _, dim = storage.shape
    blocks = storage.flatten(0, 1).index_select(0, group.block_rows(num_kv_heads, num_blocks))
    return blocks.view(num_kv_heads * group.num_sequences, group.num_keys, dim)


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
