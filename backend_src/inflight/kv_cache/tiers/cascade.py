"""TierCascade: the tiers below the primary pool in their order, and a block's way down."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain
from threading import Thread

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.retention import Retention
from inflight.kv_cache.tiers.host import HostStorage
from inflight.kv_cache.tiers.loading import BlockLoader, BlockReader, Load
from inflight.kv_cache.tiers.storage import LazyBlock, SlowStorage, TierBlock
from inflight.kv_cache.tiers.write_behind import BlockWriter, WriteBehind

logger = logging.getLogger(__name__)

WRITE_QUEUE_BYTES = 64 << 20
"""Blocks on their way to the disk: about a tenth of a second of a disk that writes 500 MB/s."""
_LOADER_TIMEOUT = _ABANDON_TIMEOUT = 1.0


class Place(Enum):
    HOST = "host"
    """In host memory: in its tier, or still in the queue to the disk."""
    DISK = "disk"


class TierCascade:
    """Host memory, then disk; either may be missing. Used from one thread.

    A block stays in its tier when it is onboarded, so evicting it again costs nothing, and what the
    host tier gives up goes to the disk unless it is there already.
    """

    def __init__(
        self,
        host: HostStorage | None,
        disk: SlowStorage | None,
        *,
        write_queue_bytes: int = WRITE_QUEUE_BYTES,
        writer: BlockWriter | None = None,
        loader: BlockReader | None = None,
    ) -> None:
        """``write_queue_bytes``: of blocks on their way to the disk. ``writer`` and ``loader``: of
        ``disk``; None: threads that are started here."""
        assert host is not None or disk is not None
        self.host = host
        self.disk = disk
        self.num_dropped = 0
        """Blocks lost because the queue to the disk was full."""
        self._moved: deque[bytes] | None = None
        """Of ``take_moved``, from all threads; None: nobody takes them."""
        self._is_closed = False
        self._writer, self._loader = writer, loader
        if disk is not None:
            disk.on_lost = self._note
            self._writer = writer or WriteBehind(disk, write_queue_bytes, self._note)
            self._loader = loader or BlockLoader(disk)

    def place_of(self, key: BlockKey) -> Place | None:
        """The fastest place that has the block."""
        if self._is_in_memory(key):
            return Place.HOST
        if self.disk is not None and self.disk.contains(key):
            return Place.DISK
        return None

    def places_of(self, key: BlockKey) -> frozenset[Place]:
        """All places that have the block."""
        # Memory first: a block that is written meanwhile is on disk before it leaves the queue.
        places = [Place.HOST] if self._is_in_memory(key) else []
        if self.disk is not None and self.disk.contains(key):
            places.append(Place.DISK)
        return frozenset(places)

    def keep_moved(self) -> None:
        """From now on ``take_moved`` has what it promises; somebody has to call it regularly."""
        self._moved = deque()

    def take_moved(self) -> Sequence[bytes]:
        """Digests of blocks whose ``places_of`` may have changed since the last call."""
        moved: list[bytes] = []
        while self._moved:
            moved.append(self._moved.popleft())
        return moved

    def _note(self, digest: bytes) -> None:
        if self._moved is not None:
            self._moved.append(digest)

    def _is_in_memory(self, key: BlockKey) -> bool:
        if self.host is not None and self.host.contains(key):
            return True
        return self._writer is not None and self._writer.find(key) is not None

    def find(self, key: BlockKey) -> TierBlock | None:
        """A block that is in host memory; counts as used."""
        block = None if self.host is None else self.host.get(key)
        if block is None and self._writer is not None:
            block = self._writer.find(key)
        return block

    def renew(self, key: BlockKey, retention: Retention) -> None:
        """A block of the tiers was evicted once more: it counts as used wherever it is, and what
        was said of it last counts from now on."""
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.renew(key, retention)

    def put(self, block: TierBlock) -> None:
        """Into the first tier; never waits for a disk."""
        given_up = (block,) if self.host is None else self.host.put(block)
        self._note(block.key.digest)
        for old in given_up:
            self._note(old.key.digest)
            if self._writer is None or self.disk is None:
                continue
            if not self.disk.contains(old.key) and not self._writer.offer(old):
                self.num_dropped += 1

    def load(self, keys: Sequence[BlockKey], now: float) -> Load:
        """Begins to read blocks from the disk."""
        assert self._loader is not None
        return self._loader.start(keys, now)

    def wait_for_any(self, loads: Sequence[Load], timeout: float) -> None:
        """Until one of the loads is done, ``timeout`` seconds at most."""
        if self._loader is not None:
            self._loader.wait(loads, timeout)

    def wait_until_written(self, timeout: float) -> bool:
        """Whether everything that was on its way to the disk is there, after ``timeout`` seconds
        at most."""
        return self._writer is None or self._writer.wait_until_written(timeout)

    def close(self, timeout: float, cached: Iterable[LazyBlock] = ()) -> None:
        """Ends the threads. A disk that outlives the process gets what is in memory, as far as
        ``timeout`` seconds and its bytes reach: ``cached`` in their order, then host memory, the
        most valuable block first, and the queue, the newest first. Safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout
        if self._loader is not None:
            self._loader.close(_LOADER_TIMEOUT)
        if self._writer is None or self.disk is None:
            return
        unwritten = self._writer.close(timeout)
        if unwritten is None:
            self._abandon(self.disk)
            return
        in_memory = () if self.host is None else self.host.most_valuable_first()
        below = map(_lazy, chain(in_memory, reversed(unwritten)))
        num_kept = self.disk.close(chain(cached, below), deadline)
        if num_kept:
            logger.info("KV tiers: %d blocks that were in memory stay on disk", num_kept)

    def _abandon(self, disk: SlowStorage) -> None:
        """A disk that hangs may hang here too, and nobody waits for that."""
        thread = Thread(target=disk.abandon, name="inflight-kv-abandon", daemon=True)
        thread.start()
        thread.join(_ABANDON_TIMEOUT)
        if thread.is_alive():
            logger.error("KV tiers: the disk hangs; the next start deletes the blocks on it")


def _lazy(block: TierBlock) -> LazyBlock:
    return LazyBlock(block.key, block.retention, lambda: block.content)
