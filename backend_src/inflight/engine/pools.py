"""Which KV pools a model gets, and how memory is divided between them.

A pool for each window, so that the layers with one give their blocks back early. The pools are made
to run out together: in the proportion of the blocks that generating sequences of TYPICAL_SEQ_LEN
tokens hold in each. What one context chunk holds for a moment comes on top.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from inflight.api.executor_config import ExecutorConfig
from inflight.api.kv_pools import KvGroup, KvPool, most_blocks
from inflight.engine.memory import TYPICAL_SEQ_LEN, KvMemory, num_kv_blocks


class LayeredModel(Protocol):
    """What ``model.runner.ModelSpec`` says of a model's layers."""

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def layer_groups(self) -> tuple[KvGroup, ...]: ...


def outgrown_windows(model: LayeredModel, config: ExecutorConfig) -> tuple[KvGroup, ...]:
    """The groups of layers with a window that a sequence may outgrow."""
    return tuple(
        group
        for group in model.layer_groups
        if group.window is not None and group.window < config.max_seq_len
    )


def layer_groups(model: LayeredModel, config: ExecutorConfig) -> tuple[KvGroup, ...]:
    """The groups of layers that get a pool each, at least one.

    A window that no sequence outgrows is none. With tiers below the pool all layers share one and
    keep everything: a block in a tier has the KV of all layers.
    """
    has_tiers = config.kv_cache_config.tiers.exist
    short = () if has_tiers else outgrown_windows(model, config)
    placed = {layer for group in short for layer in group.layers}
    others = tuple(layer for layer in range(model.num_layers) if layer not in placed)
    if not others:
        return short
    other_bytes = model.kv_bytes_per_token - sum(group.bytes_per_token for group in short)
    return (KvGroup(None, others, other_bytes), *short)


def kv_pools(
    config: ExecutorConfig, groups: Sequence[KvGroup], memory: KvMemory
) -> tuple[tuple[KvPool, ...], str]:
    """The pools of ``groups``, and the name of what set their size.

    ``num_kv_blocks`` is asked for the first one's, a block of which brings its share of the others
    with it. Where the others have all that they could ever use, the rest is the first one's.
    Raises ConfigError as ``num_kv_blocks`` does.
    """
    division, kv = PoolDivision(config, groups), config.kv_cache_config
    per_token = division.bytes_per_token
    num_blocks, bound = num_kv_blocks(config, kv_bytes_per_token=per_token, memory=memory)
    if kv.num_blocks is not None:
        return division.pools(num_blocks), bound
    bounds = [
        (num_blocks, bound),
        (division.most_in(0), "max_batch_size x max_seq_len"),
    ]
    if bound == "kv_cache_free_gpu_mem_fraction" and len(groups) > 1:
        num_bytes = num_blocks * kv.tokens_per_block * per_token
        bounds[0] = division.fitting(num_bytes), bound
        if kv.max_tokens is not None:
            bounds.append((kv.max_tokens // kv.tokens_per_block, "max_tokens_in_paged_kv_cache"))
    num_blocks, bound = min(bounds)
    return division.pools(max(num_blocks, 2)), bound


class PoolDivision:
    """How many blocks the other pools have beside those of the first."""

    def __init__(self, config: ExecutorConfig, groups: Sequence[KvGroup]) -> None:
        self._config = config
        self._groups = groups
        self._tokens_per_block = config.kv_cache_config.tokens_per_block
        typical = min(TYPICAL_SEQ_LEN, config.max_seq_len)
        self._typical = [self._most_of(group, typical, chunk=1) for group in groups]

    def _most_of(self, group: KvGroup, num_tokens: int, *, chunk: int) -> int:
        size = self._tokens_per_block
        return most_blocks(num_tokens, group.window, chunk=chunk, tokens_per_block=size)

    @property
    def bytes_per_token(self) -> int:
        """Of a block of the first pool and its share of the others, for each of its tokens."""
        weighted = zip(self._groups, self._typical, strict=True)
        total = sum(group.bytes_per_token * typical for group, typical in weighted)
        return -(-total // self._typical[0])

    def fitting(self, num_bytes: int) -> int:
        """Blocks of the first pool for which all pools together take at most ``num_bytes``."""
        most = num_bytes // (self._tokens_per_block * self._groups[0].bytes_per_token)
        return max(0, bisect_right(range(most + 1), num_bytes, key=self._num_bytes) - 1)

    def _num_bytes(self, num_blocks: int) -> int:
        pools = self.pools(num_blocks)
        total = sum(pool.num_blocks * pool.group.bytes_per_token for pool in pools)
        return total * self._tokens_per_block

    def most_in(self, number: int) -> int:
        """Blocks of a pool that ``max_batch_size`` requests of ``max_seq_len`` hold at most."""
        return self._config.max_batch_size * self._longest(number)

    def _longest(self, number: int) -> int:
        config = self._config
        return self._most_of(self._groups[number], config.max_seq_len, chunk=config.max_num_tokens)

    def pools(self, num_blocks: int) -> tuple[KvPool, ...]:
        """``num_blocks``: of the first."""
        first, *others = self._groups
        pools = [KvPool(first, num_blocks)]
        for number, group in enumerate(others, 1):
            share = -(-num_blocks * self._typical[number] // self._typical[0])
            chunk = -(-self._config.max_num_tokens // self._tokens_per_block)
            # Who fits into the first pool alone has to fit into the others.
            blocks = min(max(share + chunk, self._longest(number)), self.most_in(number))
            pools.append(KvPool(group, min(blocks, num_blocks) if first.window is None else blocks))
        return tuple(pools)
