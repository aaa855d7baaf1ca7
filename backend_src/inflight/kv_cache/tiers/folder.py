"""The folder of the disk tier: the server's alone, and one process's at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from inflight.errors import ConfigError

FOLDER = "inflight_kv_blocks"


def private_folder(parent: Path) -> Path:
    """Below ``parent``, made where it is missing. Raises ConfigError where it cannot be made, or
    others may enter it."""
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


def take_lock(folder: Path) -> int:
    """A descriptor; closing it gives the folder back. Raises ConfigError where it is in use."""
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
