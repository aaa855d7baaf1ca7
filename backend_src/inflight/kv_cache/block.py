"""Block, the unit of KV memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention

if TYPE_CHECKING:
    from inflight.kv_cache.radix_tree import Node


class Block:
    """``tokens_per_block`` slots of the KV storage: [block_id * T, (block_id + 1) * T).

    A block is *empty* (nobody references it, nothing of use in it), *referenced* (in the tables of
    requests, or the source of a copy that is not made yet) or *cached* (nobody references it, the
    radix tree knows its content). Only ``BlockPool`` changes it.
    """

    __slots__ = ("block_id", "ref_count", "node", "retention")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.node: Node | None = None
        """What is written in the block; None while the tree does not know it."""
        self.retention: Retention = DEFAULT_RETENTION
        """What the last request that said something about the block's content said."""

    @property
    def is_leaf(self) -> bool:
        """Nothing in the tree follows its content, which the tree knows."""
        return self.node is not None and not self.node.children

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count})"
