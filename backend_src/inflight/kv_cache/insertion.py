"""insert_cached: puts blocks whose KV comes from elsewhere into the tree, held by nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.block import Block
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.radix_tree import Node, Root
from inflight.kv_cache.retention import Retention

WriteBlocks = Callable[[npt.NDArray[np.int32]], None]
"""Fills blocks (ids int32[n]) with the first n contents. What it raises, the caller gets."""


def insert_cached(
    pool: BlockPool,
    path: tuple[Root, Sequence[Node]],
    keys: Sequence[tuple[BlockKey, Retention | None]],
    write: WriteBlocks,
) -> int:
    """Makes the blocks of ``keys`` reusable after ``path`` (a root, and nodes of the tree below it
    that follow each other), as many of the first as there are blocks for; returns how many.

    They take empty blocks and evict cached ones, but none of ``path`` or each other. They are
    written before the tree knows them, so where ``write`` raises nothing but eviction has happened.
    ``num_free`` of the pool does not change.
    """
    root, nodes = path
    for node in nodes:
        pool.reference(node.block)
    blocks = [pool.allocate() for _ in range(min(len(keys), pool.num_free))]
    pool.tell_removed()
    num_inserted = 0
    try:
        if blocks:
            write(np.array([block.block_id for block in blocks], dtype=np.int32))
        num_inserted = _commit(pool, nodes[-1] if nodes else root, blocks, keys)
    finally:
        for block in [*(node.block for node in nodes), *blocks][::-1]:
            pool.release(block)
    return num_inserted


def _commit(
    pool: BlockPool,
    parent: Node | Root,
    blocks: Sequence[Block],
    keys: Sequence[tuple[BlockKey, Retention | None]],
) -> int:
    for number, (block, (key, retention)) in enumerate(zip(blocks, keys, strict=False)):
        if not pool.commit(block, parent, key, retention):
            return number  # a collision: what comes after it has no place in the tree either
        assert block.node is not None
        parent = block.node
    return len(blocks)
