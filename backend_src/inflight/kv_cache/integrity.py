"""Whether the books of the KV cache add up: every fact again, counted from another side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from inflight.api.kv_pools import first_block_seen
from inflight.kv_cache.block import Block
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.prefix import Prefixes
from inflight.kv_cache.radix_tree import Node, RadixTree, Root
from inflight.kv_cache.sequence import KvSequence


class PoolBooks(NamedTuple):
    """All that is known of one pool."""

    pool: BlockPool
    tree: RadixTree
    prefixes: Prefixes
    sequences: Collection[KvSequence]
    window: int | None


def find_faults(books: PoolBooks, goes_on: Callable[[], bool]) -> Iterator[str]:
    """One line for each thing that is wrong; reads only. Ends early where ``goes_on`` says False;
    what it has found until then is wrong all the same."""
    pool, tree, prefixes, sequences, window = books
    for part in (
        _reference_faults(pool, sequences),
        _free_faults(pool),
        _tree_faults(pool, tree, goes_on),
        _sharing_faults(sequences),
    ):
        if not goes_on():
            return
        yield from part
    for sequence in sequences:
        if not goes_on():
            return
        yield from _sequence_faults(sequence)
        yield from _passed_faults(sequence, window)
        yield from _path_faults(sequence, prefixes)


def _reference_faults(pool: BlockPool, sequences: Collection[KvSequence]) -> Iterator[str]:
    holders = Counter(block for sequence in sequences for block in sequence.held_blocks)
    holders.update(s.copy_source for s in sequences if s.copy_source is not None)
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
    if pool.has_untold:
        yield "blocks were evicted, and observers have not heard of it"
    for block in pool.empty_blocks:
        if block.node is not None:
            yield f"block {block.block_id} is empty and has a place in the tree"
    for block in pool.cached_blocks:
        if block.node is None or block.node.block is not block:
            yield f"block {block.block_id} is cached and no match finds it"


def _tree_faults(pool: BlockPool, tree: RadixTree, goes_on: Callable[[], bool]) -> Iterator[str]:
    placed: Counter[Block] = Counter()
    for root in tree.roots:
        if tree.root(root.digest) is not root or not root.children:
            yield "a root without children, or filed wrongly"
        yield from _children_faults(root, tree)
    for node in tree:
        if not goes_on():
            return
        placed[node.block] += 1
        placed.update(node.copies)
        yield from _node_faults(node, tree)
        yield from _children_faults(node, tree)
    for block in pool.blocks:
        if placed[block] != (block.node is not None):
            yield f"block {block.block_id} is {placed[block]} times in the tree"
    reachable = pool.cached_blocks.reachable()
    for block in pool.cached_blocks:
        if block.is_leaf and block not in reachable:
            yield f"block {block.block_id} is cached, and eviction takes it for no leaf"


def _children_faults(parent: Node | Root, tree: RadixTree) -> Iterator[str]:
    for digest, child in parent.children.items():
        block_id = child.block.block_id
        if child.parent is not parent or child.key.digest != digest:
            yield f"block {block_id} is filed wrongly"
        if isinstance(parent, Node) and child.block.ref_count > 0 and parent.block.ref_count == 0:
            yield f"block {block_id} is held and block {parent.block.block_id} before it is not"
    parts = [child for child in parent.children.values() if not child.key.extra_ids]
    if parent.parts != sorted(parts, key=lambda node: node.key.token_ids):
        yield "the order of a node's children is wrong"


def _node_faults(node: Node, tree: RadixTree) -> Iterator[str]:
    block_id = node.block.block_id
    if node.block.node is not node or any(copy.node is not node for copy in node.copies):
        yield f"block {block_id} or a copy of it has another place in the tree"
    if any(copy.ref_count == 0 for copy in node.copies):
        yield f"a copy of block {block_id} is held by nobody"
    if node.block.ref_count == 0 and node.copies:
        yield f"block {block_id} is cached although a copy of it is held"
    if not tree.is_full(node) and (node.children or node.copies):
        yield f"block {block_id} is not full, and something comes after it or is a copy of it"


def _sharing_faults(sequences: Collection[KvSequence]) -> Iterator[str]:
    """A block has one place in all tables, and only written blocks are shared."""
    places: dict[Block, int] = {}
    for sequence in sequences:
        for index, block in enumerate(sequence.held_blocks, sequence.num_passed):
            if places.setdefault(block, index) != index:
                yield f"block {block.block_id} has two places in the tables"
            is_written = index * sequence.tokens_per_block < sequence.history_length
            if block.ref_count > 1 and not is_written:
                yield f"request {sequence.request_id}: block {block.block_id} is shared, unwritten"


def _sequence_faults(sequence: KvSequence) -> Iterator[str]:
    name = f"request {sequence.request_id}"
    held = sequence.held_blocks
    if sequence.table.tolist() != [block.block_id for block in sequence.blocks]:
        yield f"{name}: the table differs from the blocks held"
    if len(set(held)) != len(held):
        yield f"{name}: a block is twice in the table"
    if not sequence.num_committed_tokens <= sequence.history_length <= sequence.capacity:
        yield (
            f"{name}: {sequence.num_committed_tokens} committed, {sequence.history_length} "
            f"written, room for {sequence.capacity} tokens"
        )
    if sequence.copy_source is not None and not sequence.has_pending_copy:
        yield f"{name}: the source of a copy is held, and no copy is due"
    for block in held[max(sequence.num_committed_blocks - sequence.num_passed, 0) :]:
        # Of a block that a fork shares the other holder may have committed it.
        if block.node is not None and block.ref_count == 1:
            yield f"{name}: block {block.block_id} is not committed, yet known"
    if sequence.num_committed_blocks > len(sequence.known_keys):
        yield f"{name}: committed blocks without a key"


def _passed_faults(sequence: KvSequence, window: int | None) -> Iterator[str]:
    """Exactly the blocks that the next token does not see have been given up."""
    size = sequence.tokens_per_block
    expected = first_block_seen(sequence.history_length, window, size)
    if sequence.num_passed != expected or expected > sequence.num_blocks:
        yield (
            f"request {sequence.request_id}: {sequence.num_passed} of {sequence.num_blocks} blocks "
            f"are given up, {expected} are out of its window"
        )


def _path_faults(sequence: KvSequence, prefixes: Prefixes) -> Iterator[str]:
    """Whether the committed blocks are filed where the request's next lookup seeks them."""
    end = min(sequence.num_committed_blocks, len(sequence.known_keys))
    for index in range(sequence.num_passed, end):
        node = sequence.blocks[index].node
        if (
            node is None
            or node.key != sequence.known_keys[index]
            or node.parent is not prefixes.parent(sequence, index)
        ):
            block_id = sequence.blocks[index].block_id
            yield f"request {sequence.request_id}: block {block_id} has a wrong place in the tree"
            return
