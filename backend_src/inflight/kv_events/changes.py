"""ChangeQueue: from the engine's thread to the publisher's, bounded, without ever waiting."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from inflight.kv_cache import ObservedBlock, PrefixIdentity

MAX_QUEUED = 100_000
"""Changes that may wait for the publisher; each is a tuple of references to what the cache holds
anyway. An iteration makes a few hundred at most."""

_PUBLIC_ROOT = PrefixIdentity().root_digest()


class CachedBlock(NamedTuple):
    """A full block in one tier."""

    digest: bytes
    """``BlockKey.digest``."""
    medium: str
    parent_digest: bytes | None
    token_ids: bytes
    """``BlockKey.token_ids``."""


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
        self._cached: dict[bytes, dict[str, CachedBlock]] = {}
        """By digest and medium, in the order of the first announcement."""
        self._has_dropped = False
        self._is_closed = False
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        """Changes that no message told one by one."""
        return self._num_dropped

    def stored(self, observed: ObservedBlock, medium: str) -> None:
        parent = observed.parent_digest
        if observed.root_digest != _PUBLIC_ROOT or observed.key.extra_ids:
            return
        with self._condition:
            if parent is not None and parent not in self._cached:
                return
            block = CachedBlock(observed.key.digest, medium, parent, observed.key.token_ids)
            self._cached.setdefault(block.digest, {})[medium] = block
            self._add(Change(block, True))

    def removed(self, observed: ObservedBlock, medium: str) -> None:
        with self._condition:
            tiers = self._cached.get(observed.key.digest)
            block = None if tiers is None else tiers.pop(medium, None)
            if block is None:
                return
            if not tiers:
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
            return Taken([], [block for tiers in self._cached.values() for block in tiers.values()])

    def close(self) -> None:
        """Wakes who waits. What is said after that is kept within the bound and never taken."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class TierObserver:
    """A ``BlockObserver`` that reports the blocks of one tier to a queue."""

    def __init__(self, queue: ChangeQueue, medium: str) -> None:
        """``medium``: what events call the tier: "GPU" the primary one, "CPU", "DISK"."""
        self._queue = queue
        self._medium = medium

    def stored(self, block: ObservedBlock) -> None:
        self._queue.stored(block, self._medium)

    def removed(self, block: ObservedBlock) -> None:
        self._queue.removed(block, self._medium)
