"""The KV pools of a model: which layers share one, and how many of its blocks a sequence holds.

Layers with a sliding window never look at keys before it, so their blocks can be given back while
the sequence goes on. Layers are grouped by window, and each group has a pool of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class KvGroup(NamedTuple):
    """Layers whose KV is held equally long."""

    window: int | None
    """Their queries at position p see keys at (p - window, p]; None: all at or before p."""
    layers: tuple[int, ...]
    """Their numbers, ascending."""
    bytes_per_token: int
    """K and V of one token over these layers."""


class KvPool(NamedTuple):
    """The blocks of a group."""

    group: KvGroup
    num_blocks: int

    @property
    def window(self) -> int | None:
        return self.group.window

    @property
    def layers(self) -> tuple[int, ...]:
        return self.group.layers


ALL_LAYERS = KvGroup(None, (), 0)
"""Of a model without windows that is known by its number of blocks alone."""


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


def first_block_seen(position: int, window: int | None, tokens_per_block: int) -> int:
    """Index of the first block of a sequence that its queries from ``position`` on look at."""
    return 0 if window is None else max(0, position - window + 1) // tokens_per_block


def most_blocks(num_tokens: int, window: int | None, *, chunk: int, tokens_per_block: int) -> int:
    """Blocks that a sequence holds at most at once until it has ``num_tokens`` tokens, written no
    more than ``chunk`` at a time.

    While a chunk is written, the keys before it that its first query sees are held, window - 1 of
    them. n tokens in a row lie in at most ceil((n - 1) / tokens_per_block) + 1 blocks.
    """
    all_blocks = -(-num_tokens // tokens_per_block)
    if window is None:
        return all_blocks
    num_held_tokens = window - 1 + chunk
    return min(all_blocks, -(-(num_held_tokens - 1) // tokens_per_block) + 1)
