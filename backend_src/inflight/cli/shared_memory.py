"""The part of /dev/shm that belongs to one supervisor, and what dead ones left behind.

A stub that is killed, or never started, leaves its region. A supervisor therefore gives its server
a prefix of its own and removes everything under it when the server has gone. It holds a lock on a
file of that prefix while it lives: where the lock is free, the owner has died and its regions are
nobody's (a process id would not tell, as containers may share /dev/shm but not process ids).
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
from pathlib import Path
from types import TracebackType

DIRECTORY = Path("/dev/shm")
_FAMILY = "inflight_"
_LOCK_SUFFIX = "lock"


class SharedMemoryPrefix:
    """A context manager: owns ``prefix`` inside, and leaves nothing of it outside."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.prefix = f"{_FAMILY}{secrets.token_hex(4)}_"
        self._directory = directory
        self._lock = directory / (self.prefix + _LOCK_SUFFIX)
        self._descriptor: int | None = None

    def __enter__(self) -> SharedMemoryPrefix:
        self._descriptor = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._descriptor is not None
        self.clear()
        self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)

    def clear(self) -> int:
        """Removes the regions under the prefix, once no process uses them; their number."""
        return _remove(self._directory, self.prefix, keep=self._lock)


def remove_leftovers(directory: Path = DIRECTORY) -> int:
    """Removes the regions of supervisors that died without doing it; their number."""
    removed = 0
    for lock in directory.glob(f"{_FAMILY}*_{_LOCK_SUFFIX}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # removed meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed += _remove(directory, lock.name.removesuffix(_LOCK_SUFFIX), keep=lock)
            lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
    return removed


def _remove(directory: Path, prefix: str, *, keep: Path) -> int:
    removed = 0
    for region in directory.glob(glob.escape(prefix) + "*"):
        if region != keep:
            region.unlink(missing_ok=True)
            removed += 1
    return removed
