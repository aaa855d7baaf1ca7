"""Where the cache lies, and how a folder in it comes to be: once, whole or not there at all.

::

    <root>/
    ├── <key>/             finished
    ├── <key>.lock         locked (flock) while somebody makes it
    └── <key>.*.partial/   being made, or left over by a maker that was killed: the next removes it
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.errors import CheckpointError

_DEFAULT_CACHE_DIR = "~/.cache/inflight"


def cache_root(cache_dir: str) -> Path:
    """The folder that the key ``cache_dir`` names; "" is ~/.cache/inflight. Raises CheckpointError
    where nobody knows what ~ is."""
    try:
        return Path(cache_dir or _DEFAULT_CACHE_DIR).expanduser().absolute()
    except RuntimeError:
        raise CheckpointError("cache_dir: this user has no home folder: set it") from None


def make_once(
    target: Path,
    make: Callable[[Path, int], None],
    *,
    is_made: Callable[[], bool],
    on_wait: Callable[[], None],
) -> None:
    """Returns when ``is_made()`` holds, after calling ``make`` if nobody else did.

    ``make(folder, lock_fd)`` fills an empty folder, which then becomes ``target``, in place of
    whatever was there; ``lock_fd`` is the descriptor that the lock belongs to. ``on_wait`` is
    called when another process is making it. Raises OSError, and what ``make`` raises.
    """
    if is_made():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock"), on_wait) as lock_fd:
        if not is_made():
            _make(target, make, lock_fd)


def _make(target: Path, make: Callable[[Path, int], None], lock_fd: int) -> None:
    for left_over in target.parent.glob(f"{target.name}.*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        make(partial, lock_fd)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        yield lock_fd
    finally:
        os.close(lock_fd)
