"""RadixTree, the prefix index: which block holds the KV of which tokens after which prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

from inflight.kv_cache.block import Block
from inflight.kv_cache.identity import BYTES_PER_TOKEN, BlockKey

_MAX_PARTS_LOOKED_AT = 16
"""Blocks with an equal beginning that a search looks at, so that its time is bounded."""


class Node:
    """The content of one block; the path from its root spells the tokens before it.

    ``block`` holds that content and is what a match finds. Requests that computed the same tokens
    at the same time each hold a block of their own; those are the ``copies``, referenced, and not
    found by others. As soon as nobody references ``block``, a copy takes its place
    (``BlockPool``), so whoever holds a block of a node keeps every node above it referenced.

    A node whose block is not full is a *part*: always a leaf, matched only by ``find_part``.
    """

    __slots__ = ("key", "parent", "children", "parts", "block", "copies")

    def __init__(self, key: BlockKey, parent: Node | Root, block: Block) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        """By digest, parts included."""
        self.parts: list[Node] = []
        """Children of which a beginning may be reused, ordered by their tokens' bytes."""
        self.block = block
        self.copies: list[Block] = []

    @property
    def digest(self) -> bytes:
        return self.key.digest


class Root:
    """Stands above the first blocks of all requests of one PrefixIdentity; in a pool with a window,
    where blocks come and go singly, above each block, for the block before it."""

    __slots__ = ("digest", "identity_digest", "children", "parts")

    def __init__(self, digest: bytes, identity_digest: bytes | None = None) -> None:
        self.digest = digest
        """What the digests of its children are chained to."""
        self.identity_digest = identity_digest or digest
        """``PrefixIdentity.root_digest``."""
        self.children: dict[bytes, Node] = {}
        self.parts: list[Node] = []


def _order(node: Node) -> bytes:
    return node.key.token_ids


class RadixTree:
    """Nodes by parent and digest. It owns no memory: blocks belong to the pool."""

    __slots__ = ("_roots", "_full_size")

    def __init__(self, tokens_per_block: int) -> None:
        self._roots: dict[bytes, Root] = {}
        """By digest; only those with children."""
        self._full_size = tokens_per_block * BYTES_PER_TOKEN

    def root(self, digest: bytes, identity_digest: bytes | None = None) -> Root:
        """The root with this digest, an identity's unless ``identity_digest`` says whose it is;
        where it has no block yet, a new one that the tree forgets unless something is inserted."""
        return self._roots.get(digest) or Root(digest, identity_digest)

    def is_full(self, node: Node) -> bool:
        return len(node.key.token_ids) == self._full_size

    def find(self, parent: Node | Root, key: BlockKey) -> Node | None:
        """The child of ``parent`` with this key, tokens compared; None when there is none."""
        node = parent.children.get(key.digest)
        if node is None or node.key.token_ids != key.token_ids:
            return None
        return node if node.key.extra_ids == key.extra_ids else None

    def match(self, root: Root, keys: Iterable[BlockKey]) -> list[Node]:
        """The longest known prefix of ``keys``, first block first; takes no key past a miss."""
        nodes: list[Node] = []
        parent: Node | Root = root
        for key in keys:
            node = self.find(parent, key)
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def longest_part(self, parent: Node | Root, tokens: bytes, *, only_unused: bool = False) -> int:
        """How many of the first of ``tokens`` (4 bytes each) ``find_part`` finds, at most.

        O(log children): in byte order the longest common beginning is that of a neighbour.
        """
        at = bisect_left(parent.parts, tokens, key=_order)
        neighbours = parent.parts[max(at - 1, 0) : at + 1]
        length = max((_num_common_tokens(_order(n), tokens) for n in neighbours), default=0)
        if length and only_unused:
            beginning = tokens[: length * BYTES_PER_TOKEN]
            return length if self.find_part(parent, beginning, only_unused=True) else 0
        return length

    def find_part(
        self, parent: Node | Root, tokens: bytes, *, only_unused: bool = False
    ) -> Node | None:
        """A child of ``parent`` that begins with ``tokens`` (4 bytes each, at least one).

        ``only_unused``: a leaf that nobody references. Looks at a bounded number of children.
        """
        at = bisect_left(parent.parts, tokens, key=_order)
        for node in islice(parent.parts, at, at + _MAX_PARTS_LOOKED_AT):
            if not node.key.token_ids.startswith(tokens):
                break
            if not only_unused or (node.block.ref_count == 0 and not node.children):
                return node
        return None

    def part_within(self, parent: Node | Root, key: BlockKey) -> Node | None:
        """The child of ``parent`` whose tokens are a true beginning of ``key``'s, if there is one.

        It is the last in order before ``key``, since nothing that lies between is inserted without
        removing it.
        """
        at = bisect_left(parent.parts, key.token_ids, key=_order)
        if at == 0 or key.extra_ids:
            return None
        before = parent.parts[at - 1]
        is_within = key.token_ids.startswith(before.key.token_ids)
        return before if is_within and not self.is_full(before) else None

    def can_insert(self, parent: Node | Root, key: BlockKey) -> bool:
        """False where the digest is taken: by an equal block, or by other tokens (a collision)."""
        return key.digest not in parent.children

    def insert(self, parent: Node | Root, key: BlockKey, block: Block) -> Node:
        """A new leaf under ``parent`` that ``block`` holds."""
        assert self.can_insert(parent, key)
        if isinstance(parent, Root):
            self._roots[parent.digest] = parent
        node = Node(key, parent, block)
        parent.children[key.digest] = node
        if not key.extra_ids:
            parent.parts.insert(bisect_left(parent.parts, key.token_ids, key=_order), node)
        return node

    def remove(self, leaf: Node) -> Node | Root:
        """Forgets a leaf; returns its parent."""
        assert not leaf.children
        parent = leaf.parent
        del parent.children[leaf.key.digest]
        if not leaf.key.extra_ids:
            at = bisect_left(parent.parts, leaf.key.token_ids, key=_order)
            assert parent.parts[at] is leaf
            del parent.parts[at]
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.digest]
        return parent

    @property
    def roots(self) -> Iterator[Root]:
        return iter(self._roots.values())

    def __iter__(self) -> Iterator[Node]:
        """Every node, parents before their children."""
        pending = [node for root in self._roots.values() for node in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


def _num_common_tokens(left: bytes, right: bytes) -> int:
    """Tokens that two token strings have in common at their beginning."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // BYTES_PER_TOKEN
    # The first differing byte by halving: slices compare at memory speed.
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low // BYTES_PER_TOKEN
