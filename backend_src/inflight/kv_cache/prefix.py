"""Prefixes: which blocks of the tree make a beginning of a request reusable.

Without a window that is a path from the root. With one only the blocks that the next token sees
have to be there, wherever the ones before them went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import first_block_seen
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.radix_tree import Node, RadixTree, Root
from inflight.kv_cache.sequence import KvSequence


class ReusablePrefix(NamedTuple):
    """Whole blocks at the beginning of a request that need not be computed."""

    num_blocks: int
    nodes: Sequence[Node]
    """The last ones of them: those that the request would hold."""

    @property
    def num_passed(self) -> int:
        """Blocks before those that it would hold."""
        return self.num_blocks - len(self.nodes)


class Prefixes(Protocol):
    """How one pool finds prefixes, and where it files blocks."""

    def find(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], most: int
    ) -> ReusablePrefix:
        """The longest beginning of ``token_ids`` (int32[n], all from the start) that is reusable,
        of at most ``most`` whole blocks. The keys of those and of the block after them, where
        there are so many, are known to ``sequence`` then."""
        ...

    def parent(self, sequence: KvSequence, index: int) -> Node | Root:
        """Under what block ``index`` of a started sequence is filed; those before are committed."""
        ...

    def parent_after(self, sequence: KvSequence, prefix: ReusablePrefix) -> Node | Root:
        """Under what the block after a prefix that ``find`` gave would be filed."""
        ...

    def seen_from(self, prefix: ReusablePrefix, position: int) -> ReusablePrefix:
        """``prefix`` without the blocks that a token at ``position``, in the block after it, does
        not see any more."""
        ...


class WholePrefixes:
    """A block is reusable after all blocks before it. They are filed as a path of the tree."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree

    def find(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], most: int
    ) -> ReusablePrefix:
        root = self._tree.root(sequence.root_digest)
        nodes = self._tree.match(root, sequence.keys(token_ids, 0, most))
        return ReusablePrefix(len(nodes), nodes)

    def parent(self, sequence: KvSequence, index: int) -> Node | Root:
        if index == 0:
            return self._tree.root(sequence.root_digest)
        node = sequence.blocks[index - 1].node
        assert node is not None
        return node

    def parent_after(self, sequence: KvSequence, prefix: ReusablePrefix) -> Node | Root:
        return prefix.nodes[-1] if prefix.nodes else self._tree.root(sequence.root_digest)

    def seen_from(self, prefix: ReusablePrefix, position: int) -> ReusablePrefix:
        return prefix


class WindowPrefixes:
    """A beginning of n tokens is reusable where the blocks that a query at position n sees are in
    the tree. Each block is filed alone, under a root that stands for the one before it: it may be
    evicted whenever nobody holds it, and no other with it."""

    def __init__(self, tree: RadixTree, window: int, tokens_per_block: int) -> None:
        self._tree = tree
        self._window = window
        self._tokens_per_block = tokens_per_block

    def find(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], most: int
    ) -> ReusablePrefix:
        keys = list(sequence.keys(token_ids, 0, most))
        end = most
        while end > 0:
            first = first_block_seen(
                end * self._tokens_per_block, self._window, self._tokens_per_block
            )
            nodes = self._last_nodes(sequence, keys, first, end)
            if len(nodes) == end - first:
                return ReusablePrefix(end, nodes)
            # Whatever ends behind the missing block and is shorter needs it as well.
            end -= len(nodes) + 1
        return ReusablePrefix(0, ())

    def parent(self, sequence: KvSequence, index: int) -> Root:
        return self._root_before(sequence, sequence.known_keys, index)

    def parent_after(self, sequence: KvSequence, prefix: ReusablePrefix) -> Root:
        return self._root_before(sequence, sequence.known_keys, prefix.num_blocks)

    def seen_from(self, prefix: ReusablePrefix, position: int) -> ReusablePrefix:
        first = first_block_seen(position, self._window, self._tokens_per_block)
        return prefix._replace(nodes=prefix.nodes[max(0, first - prefix.num_passed) :])

    def _last_nodes(
        self, sequence: KvSequence, keys: Sequence[BlockKey], first: int, end: int
    ) -> list[Node]:
        """Of the blocks [first, end), those after the last one that is missing."""
        nodes: list[Node] = []
        for index in range(end - 1, first - 1, -1):
            node = self._tree.find(self._root_before(sequence, keys, index), keys[index])
            if node is None:
                break
            nodes.append(node)
        return nodes[::-1]

    def _root_before(self, sequence: KvSequence, keys: Sequence[BlockKey], index: int) -> Root:
        root_digest = sequence.root_digest
        return self._tree.root(keys[index - 1].digest if index else root_digest, root_digest)
