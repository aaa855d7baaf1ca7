"""EvictionOrder: which cached block is given up next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from inflight.api.kv import DEFAULT_RETENTION_PRIORITY
from inflight.kv_cache.block import Block
from inflight.kv_cache.retention import DEFAULT_RETENTION

_LEAST_STALE_ENTRIES = 64

_Entry = tuple[int, int, Block]
"""(priority, ticket, block). No two entries have the same ticket and the same priority."""


class EvictionOrder:
    """The cached blocks. Of those that are leaves of the tree the one with the lowest retention
    priority goes first, and among equals the one that lost its last reference first.

    Each cached block has a *ticket*, counted up with every ``add``. Leaves lie in a heap; an entry
    whose block has another ticket or priority by now (or is not cached) is stale and skipped. A
    release goes tail first and nobody gives a prefix back before what follows it, so a block that
    gets cached is nearly always a leaf at once; the others become one in ``became_leaf``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds, for the durations of priorities."""
        self._clock = clock
        self._tickets: dict[Block, int] = {}
        self._next_ticket = itertools.count()
        self._leaves: list[_Entry] = []
        self._expiring: list[tuple[float, int, Block]] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, block: Block) -> bool:
        return block in self._tickets

    def __iter__(self) -> Iterator[Block]:
        """By priority as it was last looked at, then by age."""
        return iter(sorted(self._tickets, key=lambda b: (b.retention.priority, self._tickets[b])))

    def add(self, block: Block) -> None:
        """``block`` has just lost its last reference, and the tree knows its content."""
        assert block.ref_count == 0 and block not in self._tickets and block.node is not None
        ticket = self._tickets[block] = next(self._next_ticket)
        if not block.node.children:
            self._push(block, ticket)
        priority, duration_ms = block.retention
        if duration_ms is not None and priority != DEFAULT_RETENTION_PRIORITY:
            self._expire_later(block, ticket, self._clock() + duration_ms / 1000)

    def remove(self, block: Block) -> None:
        """``block`` is referenced again, or no longer worth keeping."""
        del self._tickets[block]

    def became_leaf(self, block: Block) -> None:
        """The last child of a block's node is gone; the block may or may not be cached."""
        ticket = self._tickets.get(block)
        if ticket is not None:
            self._push(block, ticket)

    def take(self) -> Block:
        """Removes and returns the block to evict, a leaf; there must be one."""
        self._expire()
        while True:
            entry = heappop(self._leaves)
            if self._is_current(entry):
                block = entry[2]
                del self._tickets[block]
                assert block.node is not None and not block.node.children
                return block

    def most_valuable_first(self) -> list[Block]:
        """By priority, then the one that lost its last reference last; leaf or not. O(n log n)."""
        self._expire()
        return list(self)[::-1]

    def reachable(self) -> set[Block]:
        """The cached leaves that ``take`` can come to; O(cached)."""
        return {entry[2] for entry in self._leaves if self._is_current(entry)}

    def _push(self, block: Block, ticket: int) -> None:
        if self._is_mostly_stale(len(self._leaves)):
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapify(self._leaves)
        heappush(self._leaves, (block.retention.priority, ticket, block))

    def _expire_later(self, block: Block, ticket: int, deadline: float) -> None:
        if self._is_mostly_stale(len(self._expiring)):
            self._expiring = [e for e in self._expiring if self._tickets.get(e[2]) == e[1]]
            heapify(self._expiring)
        heappush(self._expiring, (deadline, ticket, block))

    def _is_mostly_stale(self, num_entries: int) -> bool:
        """Clearing a heap of this many then removes at least half, so it costs O(1) an entry."""
        return num_entries > 2 * len(self._tickets) + _LEAST_STALE_ENTRIES

    def _is_current(self, entry: _Entry) -> bool:
        priority, ticket, block = entry
        return self._tickets.get(block) == ticket and block.retention.priority == priority

    def _expire(self) -> None:
        """Blocks whose duration is over get the default priority, at their age."""
        if not self._expiring:
            return
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, ticket, block = heappop(self._expiring)
            if self._tickets.get(block) != ticket:
                continue
            block.retention = DEFAULT_RETENTION
            assert block.node is not None
            if not block.node.children:
                self._push(block, ticket)
