"""Content hashes: of files, remembered as long as a file is the same, and of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from inflight.cache_folder import cache_root
from inflight.checkpoint.files import GGUF_BLOCKS_FILE
from inflight.errors import CheckpointError

_REMEMBERED_FROM = 1 << 20
"""Bytes; smaller files are hashed each time."""
_CONTENT_PATTERNS = (
    "config.json", "*.safetensors", "*.safetensors.index.json", GGUF_BLOCKS_FILE,
)  # fmt: skip
"""What the weights and the arithmetic of a checkpoint folder depend on."""


class FileHashes:
    """SHA-256 of files; those of large ones are kept in a folder.

    A kept hash counts while size, modification time, inode and change time are what they were:
    the last is the system's own clock, which no program sets back.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: made when first needed."""
        self._folder = folder

    def sha256(self, path: Path) -> str:
        """Raises OSError."""
        status = path.stat()
        if status.st_size < _REMEMBERED_FROM:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
        record = self._folder / f"{place}.json"
        state = [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]
        try:
            known = json.loads(record.read_text())
            if known["state"] == state:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not whole: hash again
        digest = _sha256_of_file(path)
        with suppress(OSError):  # a cache that may only be read still serves what it has
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh = record.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps({"state": state, "sha256": digest}))
            fresh.rename(record)
        return digest


def hashes_in(cache_dir: str) -> FileHashes:
    """Those kept in the cache that the key ``cache_dir`` names. Raises ConfigError where
    nobody knows what ~ is."""
    return FileHashes(cache_root(cache_dir) / "checkpoints" / "hashes")


def content_hash(directory: Path, cache_dir: str) -> str:
    """Of a checkpoint folder: its configuration and its weights, wherever it lies.

    Seconds for large weights at the first time. Raises CheckpointError when a file cannot be read.
    """
    hashes = hashes_in(cache_dir)
    digest = hashlib.sha256()
    try:
        paths = {path for pattern in _CONTENT_PATTERNS for path in directory.glob(pattern)}
        for path in sorted(paths):
            digest.update(f"{path.name}\0{hashes.sha256(path)}\0".encode())
    except OSError as error:
        raise CheckpointError(f"model_dir: {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def _sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
