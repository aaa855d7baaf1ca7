"""RadixTree, the prefix index: which block holds the KV of which tokens after which prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from inflight.kv_cache.block import Block, BlockKey


class Node:
    """The content of one full block; the path from the root spells the tokens before it.

    ``block`` holds that content and is what a match finds. Requests that computed the same tokens
    at the same time each hold a block of their own; those are the ``copies``, private and
    referenced. As soon as nobody references ``block``, a copy takes its place (``BlockPool``), so
    whoever holds a block of a node keeps every node above it referenced.
    """

    __slots__ = ("key", "parent", "children", "block", "copies")

    def __init__(self, key: BlockKey, parent: Node | RadixTree, block: Block) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.block = block
        self.copies: list[Block] = []


class RadixTree:
    """Nodes by parent and digest. It owns no memory: blocks belong to the pool."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[bytes, Node] = {}
        """The first blocks of sequences, of all salts; a salt is part of the digest."""

    def find(self, parent: Node | RadixTree, key: BlockKey) -> Node | None:
        """The child of ``parent`` with this key, tokens compared; None when there is none."""
        node = parent.children.get(key.digest)
        return node if node is not None and node.key.token_ids == key.token_ids else None

    def match(self, keys: Iterable[BlockKey]) -> list[Node]:
        """The longest known prefix of ``keys``, first block first; takes no key past a miss."""
        nodes: list[Node] = []
        parent: Node | RadixTree = self
        for key in keys:
            node = self.find(parent, key)
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def can_insert(self, parent: Node | RadixTree, key: BlockKey) -> bool:
        """False where the digest is taken: by an equal block, or by other tokens (a collision)."""
        return key.digest not in parent.children

    def insert(self, parent: Node | RadixTree, key: BlockKey, block: Block) -> Node:
        """A new leaf under ``parent`` that ``block`` holds."""
        assert self.can_insert(parent, key)
        node = Node(key, parent, block)
        parent.children[key.digest] = node
        return node

    def remove(self, leaf: Node) -> None:
        """Forgets a leaf."""
        assert not leaf.children
        del leaf.parent.children[leaf.key.digest]

    def __iter__(self) -> Iterator[Node]:
        """Every node, parents before their children."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
