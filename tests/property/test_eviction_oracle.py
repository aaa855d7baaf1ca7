"""The order of eviction against its definition, taken from a plain list each time."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api.kv import DEFAULT_RETENTION_PRIORITY
from inflight.kv_cache.block import Block
from inflight.kv_cache.eviction import EvictionOrder
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.radix_tree import Node, RadixTree
from inflight.kv_cache.retention import Retention


@dataclass
class Cached:
    block: Block
    retention: Retention
    released: float
    age: int

    def priority(self, now: float) -> int:
        """What is said, until the duration is over."""
        priority, duration_ms, _ = self.retention
        if duration_ms is not None and now >= self.released + duration_ms / 1000:
            return DEFAULT_RETENTION_PRIORITY
        return priority


class Machine:
    """A tree of held and cached blocks; a release goes tail first, as the cache does it."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.tree = RadixTree(1)
        self.order: EvictionOrder[Block] = EvictionOrder(lambda: self.now)
        self.cached: list[Cached] = []
        self.num_made = 0

    def grow(self) -> None:
        """A path of new blocks from the root or from a cached block on, then released."""
        parents = [c.block for c in self.cached]
        start = self.rng.choice([None, *parents])
        path = self._revive(start) if start is not None else []
        parent = path[-1].node if path else self.tree.root(b"root")
        for _ in range(self.rng.randint(1, 3)):
            assert parent is not None
            self.num_made += 1
            block = Block(self.num_made)
            key = BlockKey(str(self.num_made).encode(), b"", self.num_made.to_bytes(4, "little"))
            parent = block.node = self.tree.insert(parent, key, block)
            path.append(block)
        for block in reversed(path):
            self._release(block)

    def _revive(self, block: Block) -> list[Block]:
        """References a block and all before it."""
        path = []
        node = block.node
        while isinstance(node, Node):
            path.insert(0, node.block)
            self.cached = [c for c in self.cached if c.block is not node.block]
            self.order.remove(node.block)
            node = node.parent
        return path

    def _release(self, block: Block) -> None:
        if self.rng.random() < 0.5:
            block.retention = Retention(
                self.rng.choice((0, 34, 35, 36, 100)), self.rng.choice((None, 0, 1000, 5000))
            )
        self.order.add(block)
        age = max((c.age for c in self.cached), default=0) + 1
        self.cached.append(Cached(block, block.retention, self.now, age))

    def evict(self) -> None:
        leaves = [c for c in self.cached if c.block.node and not c.block.node.children]
        expected = min(leaves, key=lambda c: (c.priority(self.now), c.age))
        block = self.order.take()
        assert block is expected.block
        assert block.node is not None
        parent = self.tree.remove(block.node)
        block.node = None
        self.cached.remove(expected)
        if isinstance(parent, Node) and not parent.children:
            self.order.became_leaf(parent.block)


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_leaf_of_lowest_priority_then_the_oldest(rng: Random) -> None:
    machine = Machine(rng)
    for _ in range(40):
        step = rng.random()
        if step < 0.4 or not machine.cached:
            machine.grow()
        elif step < 0.9:
            machine.evict()
        else:
            machine.now += rng.choice((0.5, 3.0))
        assert len(machine.order) == len(machine.cached)
    while machine.cached:
        machine.evict()
