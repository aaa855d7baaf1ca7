"""EvictionOrder: which block of a level is given up next, in the primary pool and in each tier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from inflight.api.kv import DEFAULT_RETENTION_PRIORITY
from inflight.kv_cache.retention import Retention

_LEAST_STALE_ENTRIES = 64


class Evictable(Protocol):
    """A block as its level keeps it. Told apart by identity."""

    retention: Retention
    """Only the order changes it while it has the block."""

    @property
    def is_leaf(self) -> bool:
        """Nothing on its level follows it. Where that changes the order has to hear of it:
        ``EvictionOrder.became_leaf``."""
        ...


E = TypeVar("E", bound=Evictable)
T = TypeVar("T")


class EvictionOrder(Generic[E]):
    """The blocks that may be given up. Of those that are leaves the one with the lowest retention
    priority goes first, and among equals the one that was added first.

    Each block has a *ticket*, counted up with every ``add``. Leaves lie in a heap; an entry whose
    block has another ticket or priority by now, is no leaf or not here is stale and skipped. Blocks
    are mostly added tail first, so nearly always one is a leaf at once; the others become one in
    ``became_leaf``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds, for the durations of priorities."""
        self._clock = clock
        self._tickets: dict[E, int] = {}
        self._next_ticket = itertools.count()
        self._next_entry = itertools.count()
        self._leaves: list[tuple[int, int, int, E]] = []
        """(priority, ticket, number of the entry, block)."""
        self._expiring: list[tuple[float, int, E]] = []
        """(end, ticket, block)."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, block: E) -> bool:
        return block in self._tickets

    def __iter__(self) -> Iterator[E]:
        """By priority as it was last looked at, then by age."""
        return iter(sorted(self._tickets, key=lambda b: (b.retention.priority, self._tickets[b])))

    def add(self, block: E) -> None:
        """``block`` may be given up from now on, and its duration runs."""
        assert block not in self._tickets
        ticket = self._tickets[block] = next(self._next_ticket)
        if block.retention.duration_ms is not None:
            self._begin(block, ticket)
        if block.is_leaf:
            self._push(block, ticket)

    def remove(self, block: E) -> None:
        """``block`` is wanted again, or no longer worth keeping."""
        del self._tickets[block]
        if block.retention.ends_at is not None:
            block.retention = block.retention.used(self._clock())

    def became_leaf(self, block: E) -> None:
        """What followed a block is gone; the block may or may not be here."""
        ticket = self._tickets.get(block)
        if ticket is not None:
            self._push(block, ticket)

    def take(self) -> E:
        """Removes and returns the block to give up, a leaf; there must be one. Its duration, where
        it is not over, runs on."""
        self._expire()
        while True:
            entry = heappop(self._leaves)
            if self._is_current(entry):
                block = entry[-1]
                del self._tickets[block]
                return block

    def most_valuable_first(self) -> list[E]:
        """By priority, then the one that was added last; leaf or not. O(n log n)."""
        self._expire()
        return list(self)[::-1]

    def reachable(self) -> set[E]:
        """The leaves that ``take`` can come to; O(n)."""
        return {entry[-1] for entry in self._leaves if self._is_current(entry)}

    def _push(self, block: E, ticket: int) -> None:
        if self._is_mostly_stale(len(self._leaves)):
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapify(self._leaves)
        priority = block.retention.priority
        heappush(self._leaves, (priority, ticket, next(self._next_entry), block))

    def _begin(self, block: E, ticket: int) -> None:
        now = self._clock()
        block.retention = block.retention.begun(now).at(now)
        priority, _, ends_at = block.retention
        if ends_at is None or priority == DEFAULT_RETENTION_PRIORITY:
            return
        if self._is_mostly_stale(len(self._expiring)):
            self._expiring = [e for e in self._expiring if self._tickets.get(e[2]) == e[1]]
            heapify(self._expiring)
        heappush(self._expiring, (ends_at, ticket, block))

    def _is_mostly_stale(self, num_entries: int) -> bool:
        """Clearing a heap of this many then removes at least half, so it costs O(1) an entry."""
        return num_entries > 2 * len(self._tickets) + _LEAST_STALE_ENTRIES

    def _is_current(self, entry: tuple[int, int, int, E]) -> bool:
        priority, ticket, _, block = entry
        is_same = self._tickets.get(block) == ticket and block.retention.priority == priority
        return is_same and block.is_leaf

    def _expire(self) -> None:
        """Blocks whose duration is over get the default priority, at their age."""
        if not self._expiring:
            return
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, ticket, block = heappop(self._expiring)
            if self._tickets.get(block) != ticket:
                continue
            block.retention = block.retention.at(now)
            if block.is_leaf:
                self._push(block, ticket)


def parents_first(blocks: Iterable[T], parent_of: Callable[[T], T | None]) -> Iterator[T]:
    """``blocks`` in their order, but each after those that it follows, which need not be among
    them; none twice. Any number of the first is then of use by itself."""
    seen: set[T] = set()
    for block in blocks:
        path: list[T] = []
        node: T | None = block
        while node is not None and node not in seen:
            path.append(node)
            node = parent_of(node)
        seen.update(path)
        yield from reversed(path)
