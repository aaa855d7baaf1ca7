"""BlockLoader: reads blocks from a slow tier on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.storage import TierBlock, TierStorage

logger = logging.getLogger(__name__)


class Load:
    """Blocks that follow each other; reading stops at the first one that is missed."""

    def __init__(self, keys: Sequence[BlockKey], began: float) -> None:
        self.keys = keys
        self.began = began
        """Clock seconds."""
        self.blocks: list[TierBlock] = []
        """Of the first keys; complete once ``is_done``."""
        self.seconds = 0.0
        """Time that the reading took, without the wait for other loads."""
        self.is_done = False
        self.is_cancelled = False
        """Set by whoever does not want it any more."""


class BlockReader(Protocol):
    """Brings blocks from a slow tier, while others go on."""

    def start(self, keys: Sequence[BlockKey], now: float) -> Load:
        """Returns at once. ``now``: clock seconds."""
        ...

    def wait(self, loads: Sequence[Load], timeout: float) -> None:
        """Until one of them is done, ``timeout`` seconds at most."""
        ...

    def close(self, timeout: float) -> None:
        """Loads that are not done never will be."""
        ...


class BlockLoader:
    """A BlockReader on a thread. Loads are served in order, one at a time."""

    def __init__(self, storage: TierStorage) -> None:
        self._storage = storage
        self._loads: deque[Load] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="inflight-kv-loader", daemon=True)
        self._thread.start()

    def start(self, keys: Sequence[BlockKey], now: float) -> Load:
        """Returns at once. ``now``: clock seconds."""
        load = Load(keys, now)
        with self._changed:
            self._loads.append(load)
            self._changed.notify_all()
        return load

    def wait(self, loads: Sequence[Load], timeout: float) -> None:
        """Until one of them is done, ``timeout`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: any(load.is_done for load in loads), timeout)

    def close(self, timeout: float) -> None:
        """Loads that are not done never will be."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._is_closed)
                if self._is_closed:
                    return
                load = self._loads.popleft()
            self._read(load)
            with self._changed:
                load.is_done = True
                self._changed.notify_all()

    def _read(self, load: Load) -> None:
        began = time.monotonic()
        try:
            for key in load.keys:
                block = None if load.is_cancelled else self._storage.get(key)
                if block is None:
                    break
                load.blocks.append(block)
        except Exception as error:  # our own bug: what was read so far is right
            logger.error("KV blocks were not read: %s", type(error).__name__, exc_info=error)
        load.seconds = time.monotonic() - began
