"""DiskStorage: the tier on a local disk."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention
from inflight.kv_cache.tiers.block_file import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    BadBlockFileError,
    BlockFiles,
    is_block_file,
    touch,
)
from inflight.kv_cache.tiers.folder import private_folder, take_lock
from inflight.kv_cache.tiers.index import TierIndex
from inflight.kv_cache.tiers.storage import LazyBlock, TierBlock, TierUsage

logger = logging.getLogger(__name__)

_BETWEEN_KEPT_NS = 1000
"""Between the times of use of blocks that ``close`` leaves; file systems store nanoseconds."""


class DiskStorage:
    """A TierStorage of files in a folder of its own, which one process uses at a time.

    ``put`` by one thread, the rest by any. Every fault is a miss, counted, and said in the log the
    1st, 2nd, 4th, .. time; the engine goes on.
    """

    def __init__(
        self,
        parent: Path,
        max_bytes: int,
        files: BlockFiles,
        *,
        keeps_files: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keeps_files``: blocks of an earlier process are used, and stay after ``close``.
        ``clock``: seconds, that of the retentions' ends.

        Raises ConfigError when the folder cannot be made, is not ours alone, or is in use.
        """
        self._files = files
        self._keeps_files = keeps_files
        self._clock = clock
        self._index = TierIndex(max_bytes, clock)
        self._unfinished: bytes | None = None
        """The digest of the block that is being written; the index has it already."""
        self._changed: dict[bytes, int] = {}
        """Blocks whose files do not say what counts for them now, and when they were used last, in
        nanoseconds of ``time.time_ns``."""
        self._lock = threading.Lock()
        self._is_abandoned = False
        self.on_lost: Callable[[bytes], None] = lambda digest: None
        """Called on any thread with the digest of a block that is not here any more."""
        self.written_bytes = 0
        """Of KV, since the start."""
        self.num_io_errors = 0
        self.num_bad_files = 0
        self._folder = private_folder(parent)
        self._lock_file = take_lock(self._folder)
        self._take_stock()

    @property
    def usage(self) -> TierUsage:
        with self._lock:
            return self._index.usage

    def contains(self, key: BlockKey) -> bool:
        with self._lock:
            return key.digest in self._index and key.digest != self._unfinished

    def get(self, key: BlockKey) -> TierBlock | None:
        if not self.contains(key):
            return None
        path = self._path(key.digest)
        try:
            content = self._files.read(path, key)
            touch(path, time.time_ns())
            return TierBlock(key, content, self._use(key.digest))
        except FileNotFoundError:
            pass  # given up meanwhile
        except BadBlockFileError as fault:
            self._count_bad_file(fault)
        except OSError as error:
            self._count_io_error("read", error)
        self.remove(key)
        return None

    def _use(self, digest: bytes) -> Retention:
        with self._lock:
            if digest not in self._index:
                return DEFAULT_RETENTION  # given up since it was read
            retention = self._index.use(digest)
            if retention.ends_at is not None:
                self._changed[digest] = time.time_ns()
            return retention

    def put(self, block: TierBlock) -> Sequence[TierBlock]:
        key, content, retention = block
        with self._lock:
            if key.digest in self._index:
                self._renew(key.digest, retention)
                return ()
            size = self._files.size_of(key, content.nbytes)
            given_up = [entry.digest for entry in self._index.add(key, size, retention)]
            for digest in given_up:
                self._changed.pop(digest, None)
            is_kept = key.digest in self._index
            self._unfinished = key.digest if is_kept else None
        for digest in given_up:
            if digest != key.digest:
                self._delete(digest)
                self.on_lost(digest)
        if not is_kept:
            return (block,)
        self._write(block)
        return ()

    def _write(self, block: TierBlock) -> None:
        digest = block.key.digest
        with self._lock:
            retention = self._lasting(self._index.retention_of(digest))
        path = self._path(digest)
        try:
            self._files.write(path, block._replace(retention=retention))
            touch(path, time.time_ns())
        except OSError as error:
            self._count_io_error("written", error)
            self._delete(digest)
            self._forget(digest)
            self._unfinished = None
            return
        if self._is_abandoned and not self._keeps_files:
            self._delete(digest)
        with self._lock:
            self._unfinished = None
            self.written_bytes += block.content.nbytes

    def renew(self, key: BlockKey, retention: Retention) -> None:
        with self._lock:
            if key.digest in self._index:
                self._renew(key.digest, retention)

    def _renew(self, digest: bytes, retention: Retention) -> None:
        """Under the lock. Files are not touched: nobody waits for them here."""
        self._index.renew(digest, retention)
        self._changed[digest] = time.time_ns()

    def remove(self, key: BlockKey) -> None:
        if key.digest == self._unfinished:
            return  # a file that a load did not find any more is being written anew
        self._forget(key.digest)
        self._delete(key.digest)
        self.on_lost(key.digest)

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._index.remove(digest)
            self._changed.pop(digest, None)

    def close(self, blocks: Iterable[LazyBlock] = (), deadline: float = 0.0) -> int:
        """Gives the folder back, once nobody else writes.

        Without ``keeps_files`` the files are deleted. With it these blocks, the most valuable
        first, are left to the next process until ``deadline`` (of ``time.monotonic``): each that
        finds room beside those before it, where blocks that are worth less go for it. A disk that
        refuses one gets no more. Returns how many of them are left.
        """
        num_kept = 0
        if self._keeps_files:
            num_kept = self._keep(blocks, deadline)
            self._write_changes(deadline)
        else:
            self._delete_all()
        os.close(self._lock_file)
        return num_kept

    def abandon(self) -> None:
        """As ``close``, but that the folder is given back by the end of the process."""
        self._is_abandoned = True
        if not self._keeps_files:
            self._delete_all()

    def _delete_all(self) -> None:
        """What is written and what is being written; users' text is in either."""
        try:
            for path in filter(is_block_file, self._folder.iterdir()):
                self._unlink(path)
        except OSError as error:
            self._count_io_error("deleted", error)

    def _keep(self, blocks: Iterable[LazyBlock], deadline: float) -> int:
        num_kept, now = 0, time.time_ns()
        seen: set[bytes] = set()
        refused: int | None = None
        """The highest priority that found no room: nothing finds more later."""
        for key, retention, read in blocks:
            if time.monotonic() >= deadline:
                break
            if key.digest in seen:
                continue
            seen.add(key.digest)
            if self.contains(key):
                self.renew(key, retention)
            else:
                is_hopeless = refused is not None and retention.priority <= refused
                content = None if is_hopeless else read()
                if content is None:
                    continue
                if self.put(TierBlock(key, content, retention)):
                    refused = retention.priority
                    continue
                if not self.contains(key):
                    break
            with self._lock:
                self._index.pin(key.digest)
                self._changed.pop(key.digest, None)
            # The most valuable counts as the one used last.
            num_kept += 1
            self._write_change(key.digest, now - num_kept * _BETWEEN_KEPT_NS)
        return num_kept

    def _write_changes(self, deadline: float) -> None:
        for digest, used_at_ns in list(self._changed.items()):
            if time.monotonic() >= deadline:
                return
            self._write_change(digest, used_at_ns)

    def _write_change(self, digest: bytes, used_at_ns: int) -> None:
        """What counts for the block, for the next process."""
        with self._lock:
            if digest not in self._index:
                return  # a load that had begun found it damaged
            retention = self._lasting(self._index.retention_of(digest))
        path = self._path(digest)
        try:
            self._files.write_retention(path, retention)
            touch(path, used_at_ns)
        except OSError as error:
            self._count_io_error("touched", error)

    def _lasting(self, retention: Retention) -> Retention:
        """With its end in seconds since the epoch, which mean the same to a later process."""
        if retention.ends_at is None:
            return retention
        return retention._replace(ends_at=retention.ends_at - self._clock() + time.time())

    def _take_stock(self) -> None:
        """What an earlier process left: usable blocks join, all other files of ours are deleted.

        Nobody else may need those: this process holds the folder.
        """
        found = []
        for path in self._folder.iterdir():
            if not is_block_file(path):
                continue
            try:
                if not self._keeps_files or path.suffix == UNFINISHED_SUFFIX:
                    path.unlink()
                    continue
                facts = self._files.look(path)
                found.append((path.stat().st_mtime_ns, facts))
            except BadBlockFileError as fault:
                self._count_bad_file(fault)
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError as error:
                self._count_io_error("looked at", error)
        to_clock = self._clock() - time.time()
        for _, (key, retention, size) in sorted(found):
            if retention.ends_at is not None:
                retention = retention._replace(ends_at=retention.ends_at + to_clock)
            for entry in self._index.add(key, size, retention):
                self._delete(entry.digest)

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + SUFFIX)

    def _delete(self, digest: bytes) -> None:
        self._unlink(self._path(digest))

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._count_io_error("deleted", error)

    def _count_io_error(self, what: str, error: OSError) -> None:
        with self._lock:
            self.num_io_errors += 1
            number = self.num_io_errors
        _warn(number, f"a KV block on disk could not be {what}: {error.strerror}")

    def _count_bad_file(self, fault: BadBlockFileError) -> None:
        with self._lock:
            self.num_bad_files += 1
            number = self.num_bad_files
        _warn(number, f"a KV block on disk is not used: {fault}")


def _warn(number: int, what: str) -> None:
    if number & (number - 1) == 0:
        logger.warning("%s (number %d)", what, number)
