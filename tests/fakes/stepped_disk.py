"""A disk tier without threads: what is to be written and read is done when a test says so."""

from __future__ import annotations

import errno
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from inflight.engine import tiers
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers import cascade
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.loading import Load
from inflight.kv_cache.tiers.storage import TierBlock, TierStorage

QUEUED_BLOCKS = 6


class SteppedWriter:
    """A BlockWriter of few blocks."""

    def __init__(
        self, storage: TierStorage, max_bytes: int, on_left: Callable[[bytes], None]
    ) -> None:
        """As WriteBehind has it."""
        self._storage = storage
        self._on_left = on_left
        self.waiting: OrderedDict[bytes, TierBlock] = OrderedDict()

    def offer(self, block: TierBlock) -> bool:
        if block.key.digest not in self.waiting and len(self.waiting) >= QUEUED_BLOCKS:
            return False
        self.waiting.setdefault(block.key.digest, block)
        return True

    def find(self, key: BlockKey) -> TierBlock | None:
        block = self.waiting.get(key.digest)
        return block if block is not None and block.key == key else None

    def write(self, most: int) -> None:
        """The oldest ones."""
        for digest, block in list(self.waiting.items())[:most]:
            self._storage.put(block)
            del self.waiting[digest]
            self._on_left(digest)

    def wait_until_written(self, timeout: float) -> bool:
        self.write(len(self.waiting))
        return True

    def close(self, timeout: float) -> Sequence[TierBlock]:
        return list(self.waiting.values())


class SteppedLoader:
    """A BlockReader."""

    def __init__(self, storage: TierStorage) -> None:
        self._storage = storage
        self._loads: deque[Load] = deque()

    def start(self, keys: Sequence[BlockKey], now: float) -> Load:
        self._loads.append(Load(keys, now))
        return self._loads[-1]

    def read(self) -> None:
        """The oldest load, if there is one."""
        if not self._loads:
            return
        load = self._loads.popleft()
        for key in load.keys:
            block = None if load.is_cancelled else self._storage.get(key)
            if block is None:
                break
            load.blocks.append(block)
        load.is_done = True

    def wait(self, loads: Sequence[Load], timeout: float) -> None:
        """Nothing is read meanwhile."""

    def close(self, timeout: float) -> None:
        self._loads.clear()


class FaultyFiles(BlockFiles):
    """Files on a device that is full for a while."""

    is_full = False

    def write(self, path: Path, block: TierBlock) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, block)


@contextmanager
def stepped_disks() -> Iterator[None]:
    """Engines that are made inside have these in the place of threads and of good files."""
    with (
        patch.object(cascade, "WriteBehind", SteppedWriter),
        patch.object(cascade, "BlockLoader", SteppedLoader),
        patch.object(tiers, "BlockFiles", FaultyFiles),
    ):
        yield
