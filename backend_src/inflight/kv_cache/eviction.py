"""LruEviction: which cached block is given up next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from inflight.kv_cache.block import Block


class LruEviction:
    """The cached blocks, in the order in which they lost their last reference.

    The oldest is always a leaf of the tree, without looking for one: who holds a block holds all
    blocks above it, so a child can lose its last reference no later than its parent, and a release
    goes tail first, so within one release it loses it earlier. ``take_oldest`` asserts this.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        """Oldest first."""
        return iter(self._blocks)

    def add(self, block: Block) -> None:
        """``block`` has just lost its last reference and is worth keeping."""
        assert block.ref_count == 0 and block not in self._blocks
        self._blocks[block] = None

    def remove(self, block: Block) -> None:
        """``block`` is referenced again, or no longer worth keeping."""
        del self._blocks[block]

    def take_oldest(self) -> Block:
        """Removes and returns the block to evict; there must be one."""
        block, _ = self._blocks.popitem(last=False)
        assert block.node is not None and not block.node.children
        return block
