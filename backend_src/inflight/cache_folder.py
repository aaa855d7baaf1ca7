"""Where the cache lies, and how a folder in it comes to be: once, whole or not there at all.

::

    <root>/
    ├── <key>/             finished
    ├── <key>.lock         locked (flock) while somebody makes it
    └── <key>.*.partial/   being made, on its way out, or left over by a maker that was killed: who
                           makes anything beside it removes it
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inflight.errors import ConfigError

_DEFAULT_CACHE_DIR = "~/.cache/inflight"
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST)
"""What systems call it when a folder is renamed to one that holds something."""


def cache_root(cache_dir: str) -> Path:
    """The folder that the key ``cache_dir`` names; "" is ~/.cache/inflight. Raises ConfigError
    where nobody knows what ~ is."""
    try:
        return Path(cache_dir or _DEFAULT_CACHE_DIR).expanduser().absolute()
    except RuntimeError:
        raise ConfigError("cache_dir: this user has no home folder: set it") from None


def make_once(
    target: Path,
    make: Callable[[Path, int], None],
    *,
    is_made: Callable[[], bool],
    on_wait: Callable[[], None],
) -> None:
    """Returns when ``is_made()`` holds, after calling ``make`` if nobody else did.

    ``make(folder, lock_fd)`` fills an empty folder, which then becomes ``target``, in place of
    what was there and did not count as made; ``lock_fd`` is the descriptor that the lock belongs
    to. ``on_wait`` is called when another process is making it. Raises OSError, and what ``make``
    raises.
    """
    if is_made():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock"), on_wait) as lock_fd:
        if not is_made():
            _make(target, make, is_made, lock_fd)


def discard(folder: Path) -> None:
    """Removes a folder of the cache, in one step out of everybody's sight; who has mapped its files
    keeps them. It stays where another process is faster, or the cache may only be read."""
    with suppress(OSError):
        _remove(folder)


def remove_leftovers(root: Path) -> None:
    """Removes what killed makers left in ``root``, which may be as large as what they made.

    What somebody makes stays, and what has no lock: nobody can tell there."""
    for partial in root.glob("*.partial"):
        lock = root / f"{partial.name.rsplit('.', 2)[0]}.lock"
        with suppress(OSError), _locked_if_free(lock):
            shutil.rmtree(partial, ignore_errors=True)


def _make(
    target: Path, make: Callable[[Path, int], None], is_made: Callable[[], bool], lock_fd: int
) -> None:
    for left_over in target.parent.glob(f"{target.name}.*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    remove_leftovers(target.parent)
    partial = _passing_name(target)
    partial.mkdir()
    try:
        make(partial, lock_fd)
        _put(partial, target, is_made)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(partial: Path, target: Path, is_made: Callable[[], bool]) -> None:
    """Gives ``partial`` its name. The lock does not keep the place free: what lies there may be in
    use, and who empties the cache removes locks that are held, so that two make the same."""
    while True:
        try:
            partial.rename(target)
            return
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
        if is_made():
            return  # by another maker, as good as ours
        with suppress(FileNotFoundError):
            _remove(target)


def _remove(folder: Path) -> None:
    gone = _passing_name(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _passing_name(target: Path) -> Path:
    """No process number: processes of several containers may share the cache."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")


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


@contextmanager
def _locked_if_free(path: Path) -> Iterator[None]:
    """Raises OSError where it is locked, is not there, or may not be opened."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock_fd)
