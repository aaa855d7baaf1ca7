"""Blocks for the tests of tiers."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np

from inflight.kv_cache.identity import BlockKey, PrefixIdentity, block_key
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.disk import DiskStorage
from inflight.kv_cache.tiers.folder import FOLDER
from inflight.kv_cache.tiers.storage import BlockContent, TierBlock

BLOCK_BYTES = 1000
FINGERPRINT = b"f" * 32


def tier_block(number: int, salt: str | None = None) -> TierBlock:
    """Two blocks of different numbers have other tokens and other content."""
    tokens = np.arange(number * 4, number * 4 + 4, dtype=np.int32)
    key = block_key(PrefixIdentity(cache_salt=salt).root_digest(), tokens)
    content = np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    return TierBlock(key, content)


FILE_BYTES = BlockFiles.size_of(tier_block(0).key, BLOCK_BYTES)


def disk_storage(
    parent: Path,
    *,
    max_blocks: int = 100,
    files: BlockFiles | None = None,
    keeps_files: bool = True,
) -> DiskStorage:
    files = files or BlockFiles(FINGERPRINT)
    return DiskStorage(parent, max_blocks * FILE_BYTES, files, keeps_files=keeps_files)


def block_files(parent: Path) -> list[Path]:
    return sorted(path for path in (parent / FOLDER).iterdir() if path.name != "lock")


class FailingFiles(BlockFiles):
    """A device that is full, or that cannot be read."""

    def __init__(self) -> None:
        super().__init__(FINGERPRINT)
        self.is_full = False
        self.is_unreadable = False

    def write(self, path: Path, block: TierBlock) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, block)

    def read(self, path: Path, key: BlockKey) -> BlockContent:
        if self.is_unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(path, key)


class SlowFiles(BlockFiles):
    """A device that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(FINGERPRINT)
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.is_writing = threading.Event()
        """A write has begun since this was cleared."""

    def write(self, path: Path, block: TierBlock) -> None:
        self.is_writing.set()
        assert self.may_write.wait(30)
        super().write(path, block)

    def read(self, path: Path, key: BlockKey) -> BlockContent:
        assert self.may_read.wait(30)
        return super().read(path, key)
