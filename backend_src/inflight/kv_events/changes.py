"""ChangeQueue: from the engine's thread to the publisher's, bounded, without ever waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from inflight.kv_cache import ObservedBlock, PrefixIdentity
from inflight.kv_events.events import CacheGroup

MAX_QUEUED = 100_000
"""Changes that may wait for the publisher; each is a tuple of references to what the cache holds
anyway. An iteration makes a few hundred at most."""

_Where = tuple[str, CacheGroup | None]
"""Medium and group."""

_PUBLIC_ROOT = PrefixIdentity().root_digest()


class CachedBlock(NamedTuple):
    """A full block in one tier, of one pool."""

    digest: bytes
    """``BlockKey.digest``."""
    medium: str
    parent_digest: bytes | None
    token_ids: bytes
    """``BlockKey.token_ids``."""
    group: CacheGroup | None = None
    """The pool; None: consumers are not told of pools, and hear of the first one."""


class Change(NamedTuple):
    block: CachedBlock
    is_stored: bool
    """False: removed."""


class Taken(NamedTuple):
    """What the publisher finds in the queue."""

    changes: list[Change]
    """In the order in which they happened; empty where ``all_blocks`` is not None."""
    all_blocks: list[CachedBlock] | None
    """Changes were dropped: this is all that is cached now, parents before their children."""


class ChangeQueue:
    """The engine's thread says what changes, another one takes it.

    When the queue is full everything in it is dropped and counted, and the next ``take`` gives the
    whole state instead: who reads is late then, and never wrong for long.

    Only blocks of the public identity are told, those without a cache salt, an adapter and extra
    ids: a consumer knows a block by its tokens and would take the others for something else. Nor
    is a block told whose parent is not, because consumers have no place for it.
    """

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued
        self._condition = threading.Condition()
        self._changes: deque[Change] = deque()
        self._cached: dict[bytes, dict[_Where, CachedBlock]] = {}
        """By digest and place, in the order of the first announcement."""
        self._has_dropped = False
        self._is_closed = False
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        """Changes that no message told one by one."""
        return self._num_dropped

    def stored(self, observed: ObservedBlock, medium: str, group: CacheGroup | None) -> None:
        parent = observed.parent_digest
        if observed.root_digest != _PUBLIC_ROOT or observed.key.extra_ids:
            return
        with self._condition:
            if parent is not None and parent not in self._cached:
                return
            block = CachedBlock(observed.key.digest, medium, parent, observed.key.token_ids, group)
            self._cached.setdefault(block.digest, {})[medium, group] = block
            self._add(Change(block, True))

    def removed(self, observed: ObservedBlock, medium: str, group: CacheGroup | None) -> None:
        with self._condition:
            places = self._cached.get(observed.key.digest)
            block = None if places is None else places.pop((medium, group), None)
            if block is None:
                return
            if not places:
                del self._cached[block.digest]
            self._add(Change(block, False))

    def _add(self, change: Change) -> None:
        if self._has_dropped or len(self._changes) >= self._max_queued:
            self._num_dropped += len(self._changes) + 1
            self._changes.clear()
            self._has_dropped = True
        else:
            self._changes.append(change)
        if len(self._changes) <= 1:  # otherwise it was woken before
            self._condition.notify()

    def wait(self) -> bool:
        """Until there is something to take; False once the queue is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._changes or self._has_dropped or self._is_closed)
            return not self._is_closed

    def take(self) -> Taken:
        with self._condition:
            changes, self._changes = list(self._changes), deque()
            if not self._has_dropped:
                return Taken(changes, None)
            self._has_dropped = False
            cached = [block for places in self._cached.values() for block in places.values()]
            return Taken([], cached)

    def close(self) -> None:
        """Wakes who waits. What is said after that is kept within the bound and never taken."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class TierObserver:
    """A ``BlockObserver`` that reports the blocks of one tier to a queue."""

    def __init__(self, queue: ChangeQueue, medium: str, *, all_pools: bool = False) -> None:
        """``medium``: what events call the tier: "GPU" the primary one, "CPU", "DISK".
        ``all_pools``: not only the first pool, and with each block which it is."""
        self._queue = queue
        self._medium = medium
        self._all_pools = all_pools

    def stored(self, block: ObservedBlock) -> None:
        if self._all_pools:
            self._queue.stored(block, self._medium, CacheGroup(*block.pool))
        elif block.pool.number == 0:
            self._queue.stored(block, self._medium, None)

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        for block in blocks:
            if self._all_pools:
                self._queue.removed(block, self._medium, CacheGroup(*block.pool))
            elif block.pool.number == 0:
                self._queue.removed(block, self._medium, None)
