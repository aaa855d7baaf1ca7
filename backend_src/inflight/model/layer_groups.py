"""pool_of_layers: which layer's KV lies in which pool."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.api.kv_pools import KvPool


def pool_of_layers(num_layers: int, further_pools: Sequence[KvPool]) -> list[int]:
    """Of each layer the number of its pool: ``further_pools`` from 1 on, 0 for all others."""
    pool_of = [0] * num_layers
    for number, pool in enumerate(further_pools, 1):
        for layer in pool.group.layers:
            pool_of[layer] = number
    return pool_of
