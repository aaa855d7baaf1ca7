"""Whether the books of the KV cache add up: every fact again, counted from another side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from inflight.kv_cache.block import Block
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.radix_tree import Node, RadixTree
from inflight.kv_cache.sequence import KvSequence


def find_faults(
    pool: BlockPool, tree: RadixTree, sequences: Collection[KvSequence]
) -> Iterator[str]:
    """One line for each thing that is wrong; reads only."""
    yield from _reference_faults(pool, sequences)
    yield from _free_faults(pool)
    yield from _tree_faults(pool, tree)
    for sequence in sequences:
        yield from _sequence_faults(sequence, tree)


def _reference_faults(pool: BlockPool, sequences: Collection[KvSequence]) -> Iterator[str]:
    holders = Counter(block for sequence in sequences for block in sequence.blocks)
    for index, block in enumerate(pool.blocks):
        if block.block_id != index:
            yield f"block {index} has the id {block.block_id}"
        if block.ref_count != holders[block]:
            yield (
                f"block {index} has {block.ref_count} references and is in {holders[block]} tables"
            )
    if len(holders.keys() - set(pool.blocks)) > 0:
        yield "a table has a block of no pool"


def _free_faults(pool: BlockPool) -> Iterator[str]:
    """Every block is exactly one of empty, cached and referenced."""
    places = Counter(pool.empty_blocks)
    places.update(pool.cached_blocks)
    num_referenced = 0
    for block in pool.blocks:
        referenced = block.ref_count > 0
        num_referenced += referenced
        if places[block] + referenced != 1:
            yield (
                f"block {block.block_id} with {block.ref_count} references is "
                f"{places[block]} times among the free"
            )
    if pool.num_free + num_referenced != len(pool.blocks):
        yield (
            f"{pool.num_free} free and {num_referenced} referenced blocks do not make "
            f"{len(pool.blocks)}"
        )
    for block in pool.empty_blocks:
        if block.node is not None:
            yield f"block {block.block_id} is empty and has a place in the tree"
    for block in pool.cached_blocks:
        if block.node is None or block.node.block is not block:
            yield f"block {block.block_id} is cached and no match finds it"


def _tree_faults(pool: BlockPool, tree: RadixTree) -> Iterator[str]:
    ages = {block: age for age, block in enumerate(pool.cached_blocks)}
    placed: Counter[Block] = Counter()
    for digest, child in tree.children.items():
        if child.parent is not tree or child.key.digest != digest:
            yield f"the first block {child.block.block_id} is filed wrongly"
    for node in tree:
        placed[node.block] += 1
        placed.update(node.copies)
        yield from _node_faults(node)
        for digest, child in node.children.items():
            if child.parent is not node or child.key.digest != digest:
                yield f"block {child.block.block_id} is filed wrongly"
            # A child that is not cached is held: then its parent must be held as well.
            if node.block in ages and ages.get(child.block, len(ages)) > ages[node.block]:
                yield (
                    f"block {node.block.block_id} would be evicted before block "
                    f"{child.block.block_id}, which comes after it"
                )
    for block in pool.blocks:
        if placed[block] != (block.node is not None):
            yield f"block {block.block_id} is {placed[block]} times in the tree"


def _node_faults(node: Node) -> Iterator[str]:
    block_id = node.block.block_id
    if node.block.node is not node or any(copy.node is not node for copy in node.copies):
        yield f"block {block_id} or a copy of it has another place in the tree"
    if any(copy.ref_count != 1 for copy in node.copies):
        yield f"a copy of block {block_id} is not private"
    if node.block.ref_count == 0 and node.copies:
        yield f"block {block_id} is cached although a copy of it is held"


def _sequence_faults(sequence: KvSequence, tree: RadixTree) -> Iterator[str]:
    name = f"request {sequence.request_id}"
    blocks = sequence.blocks
    if sequence.table.tolist() != [block.block_id for block in blocks]:
        yield f"{name}: the table differs from the blocks held"
    if len(set(blocks)) != len(blocks):
        yield f"{name}: a block is twice in the table"
    if not sequence.num_committed_tokens <= sequence.history_length <= sequence.capacity:
        yield (
            f"{name}: {sequence.num_committed_tokens} committed, {sequence.history_length} "
            f"written, room for {sequence.capacity} tokens"
        )
    committed = blocks[: sequence.num_committed_blocks]
    for block in blocks[sequence.num_committed_blocks :]:
        if block.node is not None or block.ref_count > 1:
            yield f"{name}: block {block.block_id} is not committed, yet known or shared"
    if len(committed) > len(sequence.known_keys):
        yield f"{name}: committed blocks without a key"
    above: Node | RadixTree = tree
    for block, key in zip(committed, sequence.known_keys, strict=False):
        node = block.node
        if node is None or node.key != key or node.parent is not above:
            yield f"{name}: block {block.block_id} has a wrong place in the tree"
            return
        above = node
