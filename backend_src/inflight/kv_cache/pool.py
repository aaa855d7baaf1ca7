"""BlockPool: every block, and its way between empty, referenced and cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inflight.kv_cache.block import Block, BlockKey
from inflight.kv_cache.eviction import LruEviction
from inflight.kv_cache.radix_tree import Node, RadixTree


class BlockPool:
    """Owns the blocks, their reference counts, and the two kinds of free ones.

    Only ``allocate`` and ``reference`` lower ``num_free``; committing and releasing never do. The
    scheduler relies on it when it promises a request the blocks up to its end.
    """

    def __init__(self, num_blocks: int, tree: RadixTree) -> None:
        self.blocks: Sequence[Block] = tuple(Block(block_id) for block_id in range(num_blocks))
        self.num_allocated = 0
        """Calls of ``allocate`` since the start; ``num_evicted`` of them took a cached block."""
        self.num_evicted = 0
        self._tree = tree
        # A stack: the block given back last is the one most likely still in the CPU's caches.
        self._empty = list(reversed(self.blocks))
        self._cached = LruEviction()

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_free(self) -> int:
        """Blocks that nobody references: the empty and the cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def empty_blocks(self) -> Iterator[Block]:
        return iter(self._empty)

    @property
    def cached_blocks(self) -> Iterator[Block]:
        """In the order of eviction."""
        return iter(self._cached)

    def allocate(self) -> Block:
        """A block with one reference and no content: an empty one, else the oldest cached one.

        There must be a free block.
        """
        block = self._empty.pop() if self._empty else self._evict()
        block.ref_count = 1
        self.num_allocated += 1
        return block

    def reference(self, block: Block) -> None:
        """One more request holds this block, which the tree knows."""
        assert block.node is not None and block.node.block is block
        if block.ref_count == 0:
            self._cached.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One request fewer holds this block. A request releases its blocks tail first."""
        assert block.ref_count > 0
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        node = block.node
        if node is None:
            self._empty.append(block)
        elif node.block is not block:
            node.copies.remove(block)
            self._make_empty(block)
        elif node.copies:
            node.block = node.copies.pop()
            self._make_empty(block)
        else:
            self._cached.add(block)

    def commit(self, block: Block, parent: Node | RadixTree, key: BlockKey) -> bool:
        """Makes a referenced block's content known to the tree, under ``parent``.

        Where the tree has the same content already, ``block`` stays private, as a copy; or takes
        over, if nobody references the block that was there (whose slots become free instead).
        Returns False when another content has the same digest: the block stays unknown then.
        """
        assert block.ref_count > 0 and block.node is None
        node = self._tree.find(parent, key)
        if node is None:
            if not self._tree.can_insert(parent, key):
                return False
            block.node = self._tree.insert(parent, key, block)
            return True
        block.node = node
        if node.block.ref_count > 0:
            node.copies.append(block)
            return True
        self._cached.remove(node.block)
        self._make_empty(node.block)
        node.block = block
        return True

    def _make_empty(self, block: Block) -> None:
        block.node = None
        self._empty.append(block)

    def _evict(self) -> Block:
        block = self._cached.take_oldest()
        assert block.node is not None
        self._tree.remove(block.node)
        block.node = None
        self.num_evicted += 1
        return block
