"""WriteBehind: blocks on their way to a slow tier, and the thread that brings them there."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.storage import TierBlock, TierStorage

logger = logging.getLogger(__name__)


class BlockWriter(Protocol):
    """What stands before a slow tier: takes blocks, and never makes anybody wait."""

    def offer(self, block: TierBlock) -> bool:
        """False: there is no room, and the block is not taken."""
        ...

    def find(self, key: BlockKey) -> TierBlock | None:
        """A block that is not written yet."""
        ...

    def wait_until_written(self, timeout: float) -> bool:
        """Whether everything that was offered is written, after ``timeout`` seconds at most."""
        ...

    def close(self, timeout: float) -> Sequence[TierBlock] | None:
        """The end; returns what is not written, oldest first. None: it hangs in a write."""
        ...


class WriteBehind:
    """A bounded queue in front of a storage: ``offer`` never waits, one thread writes.

    What is still in the queue can be found, so a block is never out of reach on its way.
    """

    def __init__(
        self, storage: TierStorage, max_bytes: int, on_left: Callable[[bytes], None]
    ) -> None:
        """``max_bytes``: of contents that wait to be written. ``on_left``: called on the thread
        that writes with the digest of a block that has left the queue."""
        self._storage = storage
        self._max_bytes = max_bytes
        self._on_left = on_left
        self._waiting: OrderedDict[bytes, TierBlock] = OrderedDict()
        """By digest; the first one is being written."""
        self._waiting_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="inflight-kv-writer", daemon=True)
        self._thread.start()

    def offer(self, block: TierBlock) -> bool:
        """False: the queue is full, and the block is not taken."""
        size = block.content.nbytes
        with self._changed:
            if block.key.digest in self._waiting:
                return True
            if self._is_closed or (self._waiting and self._waiting_bytes + size > self._max_bytes):
                return False
            self._waiting[block.key.digest] = block
            self._waiting_bytes += size
            self._changed.notify_all()
        return True

    def find(self, key: BlockKey) -> TierBlock | None:
        """A block that is not written yet."""
        with self._changed:
            block = self._waiting.get(key.digest)
        return block if block is not None and block.key == key else None

    def wait_until_written(self, timeout: float) -> bool:
        """Whether everything that was offered is written, after ``timeout`` seconds at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self, timeout: float) -> Sequence[TierBlock] | None:
        """Ends the thread after the block that it is writing; returns those that still wait, oldest
        first.

        None: it still sits in that write after ``timeout`` seconds; it ends with the process.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return None if self._thread.is_alive() else list(self._waiting.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                block = next(iter(self._waiting.values()))
            try:
                self._storage.put(block)
            except Exception as error:  # our own bug: this block is lost, the next may not be
                logger.error("a KV block was not written: %s", type(error).__name__, exc_info=error)
            with self._changed:
                del self._waiting[block.key.digest]
                self._waiting_bytes -= block.content.nbytes
                self._on_left(block.key.digest)
                self._changed.notify_all()
