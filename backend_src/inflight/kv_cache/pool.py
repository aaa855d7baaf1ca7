"""BlockPool: every block, and its way between empty, referenced and cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from inflight.kv_cache.block import Block
from inflight.kv_cache.eviction import EvictionOrder, parents_first
from inflight.kv_cache.identity import BYTES_PER_TOKEN, BlockKey
from inflight.kv_cache.observer import FIRST_POOL, BlockObserver, ObservedBlock, ObservedPool
from inflight.kv_cache.radix_tree import Node, RadixTree, Root
from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention


class BlockPool:
    """Owns the blocks, their reference counts, and the two kinds of free ones.

    Only ``allocate`` and ``reference`` lower ``num_free``; committing and releasing
    never do. The scheduler relies on it when it promises a request the blocks up to its end.
    """

    def __init__(
        self,
        num_blocks: int,
        tree: RadixTree,
        clock: Callable[[], float],
        observers: Sequence[BlockObserver] = (),
        observed_as: ObservedPool = FIRST_POOL,
    ) -> None:
        """``observed_as``: what ``observers`` are told with each block."""
        self.blocks: Sequence[Block] = tuple(Block(block_id) for block_id in range(num_blocks))
        self.num_allocated = 0
        """Blocks taken since the start; ``num_evicted`` of them were cached before, and
        ``num_taken_over`` kept what they held."""
        self.num_evicted = 0
        self.num_taken_over = 0
        self._tree = tree
        self._observers = tuple(observers)
        self._observed_as = observed_as
        self._removed: list[ObservedBlock] = []
        """What ``tell_removed`` will tell."""
        # A stack: the block given back last is the one most likely still in the CPU's caches.
        self._empty = list(reversed(self.blocks))
        self._cached: EvictionOrder[Block] = EvictionOrder(clock)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_free(self) -> int:
        """Blocks that nobody references: the empty and the cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def has_untold(self) -> bool:
        """Whether blocks were given up since ``tell_removed``."""
        return bool(self._removed)

    @property
    def empty_blocks(self) -> Iterator[Block]:
        return iter(self._empty)

    @property
    def cached_blocks(self) -> EvictionOrder[Block]:
        return self._cached

    def most_valuable_first(self) -> Iterator[Node]:
        """The cached full blocks and what they follow, as eviction would come to them, reversed: a
        block comes after those before it, so that any number of the first can be reused."""
        blocks = self._cached.most_valuable_first()
        nodes = [block.node for block in blocks if block.node is not None]
        return filter(self._tree.is_full, parents_first(nodes, _node_before))

    def allocate(self) -> Block:
        """A block with one reference and no content: an empty one, else the next to be evicted.

        There must be a free block. Before anything is written into it, call ``tell_removed``.
        """
        if self._empty:
            block = self._empty.pop()
        else:
            block = self._cached.take()
            self._give_up(block)
            self.num_evicted += 1
        block.ref_count = 1
        self.num_allocated += 1
        return block

    def take_over(self, block: Block) -> None:
        """Makes a leaf that its new holder has referenced that holder's own: the tree forgets it.

        Its slots keep their KV: it counts as allocated, and as reused rather than evicted. As with
        ``allocate``, ``tell_removed`` comes before its slots are written.
        """
        assert block.ref_count > 0
        self._give_up(block)
        self.num_allocated += 1
        self.num_taken_over += 1

    def tell_removed(self) -> None:
        """Observers hear at once of all that was given up since the last call, while its KV is
        still there."""
        removed, self._removed = self._removed, []
        if removed:
            for observer in self._observers:
                observer.removed(removed)

    def reference(self, block: Block) -> None:
        """One more holds this block, which the tree knows."""
        assert block.node is not None and block.node.block is block
        if block.ref_count == 0:
            self._cached.remove(block)
        block.ref_count += 1

    def share(self, block: Block) -> None:
        """One more holds this block, which somebody holds."""
        assert block.ref_count > 0
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One fewer holds this block. A request releases its blocks tail first."""
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

    def commit(
        self, block: Block, parent: Node | Root, key: BlockKey, retention: Retention | None
    ) -> bool:
        """Makes a referenced full block's content known to the tree, under ``parent``.

        Where the tree has the same content already, ``block`` stays as a copy that no match finds;
        or takes over, if nobody references the block that was there (whose slots become free
        instead). ``retention`` None: nothing is said, what was there counts. Returns False when
        another content has the same digest: the block stays unknown then.
        """
        assert block.ref_count > 0 and block.node is None
        node = self._tree.find(parent, key)
        if node is None:
            if not self._tree.can_insert(parent, key):
                return False
            node = self._insert(block, parent, key, retention)
            for observer in self._observers:
                observer.stored(ObservedBlock.of(node, self._observed_as))
            return True
        block.node = node
        other = node.block
        if other.ref_count > 0:
            block.retention = other.retention = retention or other.retention
            node.copies.append(block)
            return True
        self._cached.remove(other)
        self._make_empty(other)
        node.block = block
        block.retention = retention or other.retention
        return True

    def commit_part(
        self, block: Block, parent: Node | Root, key: BlockKey, retention: Retention | None
    ) -> None:
        """Makes the content of a block known that is not full and is about to be released.

        Does nothing where a child of ``parent`` begins with the same tokens.
        """
        assert block.ref_count == 1 and block.node is None
        num_tokens = len(key.token_ids) // BYTES_PER_TOKEN
        is_within_another = self._tree.longest_part(parent, key.token_ids) == num_tokens
        if not is_within_another and self._tree.can_insert(parent, key):
            self._insert(block, parent, key, retention)

    def _insert(
        self, block: Block, parent: Node | Root, key: BlockKey, retention: Retention | None
    ) -> Node:
        """A new leaf; a part that is a beginning of it is of no more use."""
        part = self._tree.part_within(parent, key)
        if part is not None and part.block.ref_count == 0:
            self._cached.remove(part.block)
            self._tree.remove(part)
            self._make_empty(part.block)
        node = block.node = self._tree.insert(parent, key, block)
        block.retention = retention or DEFAULT_RETENTION
        return node

    def _make_empty(self, block: Block) -> None:
        block.node = None
        self._empty.append(block)

    def _give_up(self, block: Block) -> None:
        """Forgets the content of a leaf, for its block to be written anew."""
        node = block.node
        assert node is not None
        if self._observers and self._tree.is_full(node):
            self._removed.append(ObservedBlock.of(node, self._observed_as))
        parent = self._tree.remove(node)
        if isinstance(parent, Node) and not parent.children:
            self._cached.became_leaf(parent.block)
        block.node = None


def _node_before(node: Node) -> Node | None:
    return node.parent if isinstance(node.parent, Node) else None
