"""Conversions on disk: made once, by one process at a time, and whole or not there at all.

::

    <cache_dir>/checkpoints/
    ├── <key>/             a finished conversion
    ├── <key>.lock         locked (flock) while somebody makes it
    ├── <key>.*.partial/   being made, or left over by a maker that was killed: the next removes it
    └── hashes/            SHA-256 of large files by path, with the size and time they had

A key is the SHA-256 of what goes into the conversion: the contents of the source, the job, and the
version of the converter.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inflight.checkpoint.conversion import Converter, run_conversion
from inflight.checkpoint.locate import Job
from inflight.errors import CheckpointError

CONVERTER_VERSION = 1
"""To be raised whenever ``convert.py`` writes something else for the same source."""

_DEFAULT_CACHE_DIR = "~/.cache/inflight"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
_REMEMBER_HASHES_FROM = 1 << 20
"""Bytes; smaller files are hashed each time."""


class ConversionCache:
    def __init__(
        self,
        cache_dir: str,
        *,
        progress: Callable[[str], None],
        convert: Converter = run_conversion,
    ) -> None:
        """``cache_dir``: "" is ~/.cache/inflight; made when first needed. Raises CheckpointError
        where nobody knows what ~ is."""
        try:
            root = Path(cache_dir or _DEFAULT_CACHE_DIR).expanduser().absolute()
        except RuntimeError:
            raise CheckpointError("cache_dir: this user has no home folder: set it") from None
        self._root = root / "checkpoints"
        self._progress = progress
        self._convert = convert

    def converted(self, job: Job, source: Path) -> Path:
        """The folder with ``source`` converted by ``job``; waits while another process makes it.

        Raises CheckpointError: the conversion failed, or the cache cannot be written.
        """
        try:
            (self._root / "hashes").mkdir(parents=True, exist_ok=True)
            key = self._key(job, source)
            target = self._root / key
            if not target.is_dir():
                with self._locked(key, source) as lock_fd:
                    if not target.is_dir():
                        self._make(job, source, target, lock_fd)
            return target
        except OSError as error:
            raise CheckpointError(
                f"cache_dir: {error.filename or self._root}: {error.strerror}"
            ) from None

    def _make(self, job: Job, source: Path, target: Path, lock_fd: int) -> None:
        for left_over in self._root.glob(f"{target.name}.*.partial"):
            shutil.rmtree(left_over, ignore_errors=True)
        partial = self._root / f"{target.name}.{os.getpid()}.partial"
        partial.mkdir()
        try:
            self._progress(f"converting {source.name} (once)")
            self._convert(job, source, partial, lock_fd=lock_fd, progress=self._progress)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str, source: Path) -> Iterator[int]:
        """Holds the key's lock; yields the descriptor that the lock belongs to."""
        lock_fd = os.open(self._root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._progress(f"waiting for another process that converts {source.name}")
                fcntl.flock(lock_fd, fcntl.LOCK_EX)
            yield lock_fd
        finally:
            os.close(lock_fd)

    def _key(self, job: Job, source: Path) -> str:
        parts = [str(CONVERTER_VERSION), job.value]
        if job is Job.GGUF:
            parts.append(self._hash(source))
        elif job is Job.CONFIG:
            parts.append(self._hash(source / "config.json"))
        else:
            # Weights are linked, not copied: their place and names count, their contents do not.
            parts.append(str(source.resolve()))
            for path in sorted(path for path in source.iterdir() if path.is_file()):
                is_weights = path.suffix in _WEIGHT_SUFFIXES
                parts += [path.name, "" if is_weights else self._hash(path)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _hash(self, path: Path) -> str:
        """SHA-256 of a file's content."""
        status = path.stat()
        if status.st_size < _REMEMBER_HASHES_FROM:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
        record = self._root / "hashes" / f"{place}.json"
        state = [status.st_size, status.st_mtime_ns]
        try:
            known = json.loads(record.read_text())
            if known["state"] == state:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not whole: hash again
        digest = _sha256_of_file(path)
        with suppress(OSError):  # a cache that may only be read still serves what it has
            fresh = record.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps({"state": state, "sha256": digest}))
            fresh.rename(record)
        return digest


def _sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
