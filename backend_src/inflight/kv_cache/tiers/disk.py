"""DiskStorage: the tier on a local disk."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from inflight.errors import ConfigError
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.block_file import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    BadBlockFileError,
    BlockFiles,
)
from inflight.kv_cache.tiers.storage import BlockContent, LazyBlock, TierBlock, TierUsage

logger = logging.getLogger(__name__)

FOLDER = "inflight_kv_blocks"
_BETWEEN_KEPT_NS = 1000
"""Between the times of use of blocks that ``close`` leaves; file systems store nanoseconds."""
_OUR_FILES = re.compile(rf"[0-9a-f]{{64}}({re.escape(SUFFIX)}|{re.escape(UNFINISHED_SUFFIX)})")


class DiskStorage:
    """A TierStorage of files in a folder of its own, which one process uses at a time.

    ``put`` by one thread, the rest by any. Every fault is a miss, counted, and said in the log the
    1st, 2nd, 4th, .. time; the engine goes on.
    """

    def __init__(
        self, parent: Path, max_bytes: int, files: BlockFiles, *, keeps_files: bool
    ) -> None:
        """``keeps_files``: blocks of an earlier process are used, and stay after ``close``.

        Raises ConfigError when the folder cannot be made, is not ours alone, or is in use.
        """
        self._files = files
        self._keeps_files = keeps_files
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Bytes of each file by digest, the one used last at the end."""
        self._lock = threading.Lock()
        self.on_lost: Callable[[bytes], None] = _ignore
        """Called on any thread with the digest of a block that is not here any more."""
        self.written_bytes = 0
        """Of KV, since the start."""
        self.num_io_errors = 0
        self.num_bad_files = 0
        self._folder = _private_folder(parent)
        self._lock_file = _take_lock(self._folder)
        self._take_stock()

    @property
    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._sizes), self._used_bytes, self._max_bytes)

    def contains(self, key: BlockKey) -> bool:
        with self._lock:
            return key.digest in self._sizes

    def get(self, key: BlockKey) -> BlockContent | None:
        with self._lock:
            if key.digest not in self._sizes:
                return None
            self._sizes.move_to_end(key.digest)
        path = self._path(key.digest)
        try:
            content = self._files.read(path, key)
            os.utime(path)  # the order of use, for a later process
            return content
        except FileNotFoundError:
            pass  # given up meanwhile
        except BadBlockFileError as fault:
            self._count_bad_file(fault)
        except OSError as error:
            self._count_io_error("read", error)
        self.remove(key)
        return None

    def put(self, block: TierBlock) -> Sequence[TierBlock]:
        digest, size = block.key.digest, self._files.size_of(block)
        with self._lock:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
                return ()
            if size > self._max_bytes:
                return (block,)
            oldest = self._make_room(size)
        for given_up in oldest:
            self._unlink(given_up)
            self.on_lost(given_up)
        try:
            self._files.write(self._path(digest), block)
        except OSError as error:
            self._count_io_error("written", error)
            return ()
        with self._lock:
            self._sizes[digest] = size
            self._used_bytes += size
            self.written_bytes += block.content.nbytes
        return ()

    def remove(self, key: BlockKey) -> None:
        with self._lock:
            self._used_bytes -= self._sizes.pop(key.digest, 0)
        self._unlink(key.digest)
        self.on_lost(key.digest)

    def close(self, blocks: Iterable[LazyBlock] = (), deadline: float = 0.0) -> int:
        """Gives the folder back, once nobody else writes.

        Without ``keeps_files`` the files are deleted. With it these blocks, the most valuable
        first, are left to the next process: as many of the first as ``max_bytes`` hold and can be
        written until ``deadline`` (of ``time.monotonic``). Other blocks make room for them, and a
        disk that refuses one gets no more. Returns how many of them are left.
        """
        num_kept = 0
        if self._keeps_files:
            num_kept = self._keep(blocks, deadline)
        else:
            for digest in list(self._sizes):
                self._unlink(digest)
        self._sizes.clear()
        os.close(self._lock_file)
        return num_kept

    def _keep(self, blocks: Iterable[LazyBlock], deadline: float) -> int:
        num_kept = kept_bytes = 0
        seen: set[bytes] = set()
        now = time.time_ns()
        for key, read in blocks:
            if time.monotonic() >= deadline:
                break
            if key.digest in seen:
                continue
            seen.add(key.digest)
            size = self._sizes.get(key.digest, 0)
            if not size:
                content = read()
                if content is None:
                    continue
                size = self._files.size_of(TierBlock(key, content))
                if kept_bytes + size > self._max_bytes:
                    break
                self.put(TierBlock(key, content))
                if not self.contains(key):
                    break
            kept_bytes += size
            num_kept += 1
            # The next process takes the order of use over: the most valuable was used last.
            self._set_used(key.digest, now - num_kept * _BETWEEN_KEPT_NS)
        return num_kept

    def _set_used(self, digest: bytes, at_ns: int) -> None:
        with self._lock:
            if digest not in self._sizes:
                return  # a load that had begun found it damaged
            self._sizes.move_to_end(digest)
        try:
            os.utime(self._path(digest), ns=(at_ns, at_ns))
        except OSError as error:
            self._count_io_error("touched", error)

    def _make_room(self, size: int) -> list[bytes]:
        digests = []
        while self._used_bytes + size > self._max_bytes:
            digest, freed = self._sizes.popitem(last=False)
            self._used_bytes -= freed
            digests.append(digest)
        return digests

    def _take_stock(self) -> None:
        """What an earlier process left: usable blocks join, all other files of ours are deleted.

        Nobody else may need those: this process holds the folder.
        """
        found = []
        for path in self._folder.iterdir():
            if not _OUR_FILES.fullmatch(path.name):
                continue
            try:
                if not self._keeps_files or path.suffix == UNFINISHED_SUFFIX:
                    path.unlink()
                    continue
                self._files.check(path)
                status = path.stat()
                found.append((status.st_mtime_ns, bytes.fromhex(path.stem), status.st_size))
            except BadBlockFileError as fault:
                self._count_bad_file(fault)
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError as error:
                self._count_io_error("looked at", error)
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self._used_bytes += size
        for digest in self._make_room(0):
            self._unlink(digest)

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + SUFFIX)

    def _unlink(self, digest: bytes) -> None:
        try:
            self._path(digest).unlink(missing_ok=True)
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


def _ignore(digest: bytes) -> None:
    """Nobody asked."""


def _warn(number: int, what: str) -> None:
    if number & (number - 1) == 0:
        logger.warning("%s (number %d)", what, number)


def _private_folder(parent: Path) -> Path:
    folder = parent / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"kv_cache_disk_path: {error.strerror}") from None
    is_private = stat.S_IMODE(status.st_mode) & 0o077 == 0 and status.st_uid == os.getuid()
    if not stat.S_ISDIR(status.st_mode) or not is_private:
        raise ConfigError(
            f"kv_cache_disk_path: its folder {FOLDER} must belong to the server's user and be "
            "closed to all others (mode 0700): it holds users' text"
        )
    return folder


def _take_lock(folder: Path) -> int:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"kv_cache_disk_path: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError("kv_cache_disk_path: another process keeps its KV blocks there") from None
    return descriptor
