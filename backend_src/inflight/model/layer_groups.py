"""Which layers of a model hold their KV equally long, and in which pool."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.api.kv_pools import KvGroup, KvPool


def group_layers(
    windows: Sequence[int | None], bytes_per_token: Sequence[int]
) -> tuple[KvGroup, ...]:
    """``ModelSpec.layer_groups`` of layers with these sliding windows (None or 0: none) and bytes
    of KV a token."""
    layers_of: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window or 0, []).append(layer)
    if list(layers_of) == [0]:
        return ()
    return tuple(
        KvGroup(window or None, tuple(layers), sum(bytes_per_token[layer] for layer in layers))
        for window, layers in sorted(layers_of.items())
    )


def pool_of_layers(num_layers: int, further_pools: Sequence[KvPool]) -> list[int]:
    """Of each layer the number of its pool: ``further_pools`` from 1 on, 0 for all others."""
    pool_of = [0] * num_layers
    for number, pool in enumerate(further_pools, 1):
        for layer in pool.group.layers:
            pool_of[layer] = number
    return pool_of
