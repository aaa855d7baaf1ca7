"""TierCascade: the tiers below the primary pool in their order, and a block's way down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.disk import DiskStorage
from inflight.kv_cache.tiers.host import HostStorage
from inflight.kv_cache.tiers.loading import BlockLoader, Load
from inflight.kv_cache.tiers.storage import BlockContent, TierBlock
from inflight.kv_cache.tiers.write_behind import WriteBehind

WRITE_QUEUE_BYTES = 64 << 20
"""Blocks on their way to the disk: about a tenth of a second of a disk that writes 500 MB/s."""
_LOADER_TIMEOUT = 1.0


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
        disk: DiskStorage | None,
        *,
        write_queue_bytes: int = WRITE_QUEUE_BYTES,
        keeps_host: bool = False,
    ) -> None:
        """``write_queue_bytes``: of blocks on their way to the disk. ``keeps_host``: ``close``
        writes what is in host memory to the disk."""
        assert host is not None or disk is not None
        self.host = host
        self.disk = disk
        self.num_dropped = 0
        """Blocks lost because the queue to the disk was full."""
        self._keeps_host = keeps_host
        self._is_closed = False
        self._writer = None if disk is None else WriteBehind(disk, write_queue_bytes)
        self._loader = None if disk is None else BlockLoader(disk)

    def place_of(self, key: BlockKey) -> Place | None:
        """The fastest place that has the block."""
        if self.host is not None and self.host.contains(key):
            return Place.HOST
        if self._writer is not None and self._writer.find(key) is not None:
            return Place.HOST
        if self.disk is not None and self.disk.contains(key):
            return Place.DISK
        return None

    def find(self, key: BlockKey) -> BlockContent | None:
        """The content of a block that is in host memory."""
        content = None if self.host is None else self.host.get(key)
        if content is None and self._writer is not None:
            content = self._writer.find(key)
        return content

    def put(self, block: TierBlock) -> None:
        """Into the first tier; never waits for a disk."""
        given_up = (block,) if self.host is None else self.host.put(block)
        for old in given_up:
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

    def close(self, timeout: float) -> None:
        """Ends the threads. What is still to be written is, as far as ``timeout`` seconds reach;
        of host memory the block that was used last first. Safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout
        if self._loader is not None:
            self._loader.close(_LOADER_TIMEOUT)
        if self._writer is None or self.disk is None:
            return
        has_ended = self._writer.close(timeout)
        if not has_ended:
            return  # a disk that hangs: the folder is given back when the process ends
        if self._keeps_host and self.host is not None:
            for block in self.host.newest_first():
                if time.monotonic() >= deadline:
                    break
                self.disk.put(block)
        self.disk.close()
