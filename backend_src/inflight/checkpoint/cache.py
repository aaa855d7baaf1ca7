"""Conversions on disk: made once, by one process at a time, and whole or not there at all.

They lie in ``<cache_dir>/checkpoints`` as ``cache_folder`` describes, beside the hashes of large
files. A key is the SHA-256 of what goes into the conversion: the contents of the source, the job,
and the version of the converter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from inflight.cache_folder import cache_root, make_once
from inflight.checkpoint.conversion import Converter, run_conversion
from inflight.checkpoint.files import GGUF_BLOCKS_FILE
from inflight.checkpoint.hashes import hashes_in
from inflight.checkpoint.locate import Job
from inflight.errors import CheckpointError

CONVERTER_VERSION = 3
"""To be raised whenever ``convert.py`` writes something else for the same source."""

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


class ConversionCache:
    def __init__(
        self,
        cache_dir: str,
        *,
        progress: Callable[[str], None],
        convert: Converter = run_conversion,
    ) -> None:
        """``cache_dir``: "" is ~/.cache/inflight; made when first needed. Raises ConfigError
        where nobody knows what ~ is."""
        self._root = cache_root(cache_dir) / "checkpoints"
        self._hashes = hashes_in(cache_dir)
        self._progress = progress
        self._convert = convert

    def converted(self, job: Job, source: Path) -> Path:
        """The folder with ``source`` converted by ``job``; waits while another process makes it.

        Raises CheckpointError: the conversion failed, or the cache cannot be written.
        """

        def make(folder: Path, lock_fd: int) -> None:
            self._progress(f"converting {source.name} (once)")
            self._convert(job, source, folder, lock_fd=lock_fd, progress=self._progress)

        try:
            target = self._root / self._key(job, source)
            make_once(
                target,
                make,
                is_made=target.is_dir,
                on_wait=lambda: self._progress(
                    f"waiting for another process that converts {source.name}"
                ),
            )
            return target
        except OSError as error:
            raise CheckpointError(
                f"cache_dir: {error.filename or self._root}: {error.strerror}"
            ) from None

    def _key(self, job: Job, source: Path) -> str:
        parts = [str(CONVERTER_VERSION), job.value]
        if job is Job.GGUF:
            parts.append(self._hashes.sha256(source))
        elif job is Job.CONFIG:
            parts.append(self._hashes.sha256(source / "config.json"))
        else:
            # Weights are linked, not copied: their place and names count, their contents do not.
            parts.append(str(source.resolve()))
            for path in sorted(path for path in source.iterdir() if path.is_file()):
                is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name == GGUF_BLOCKS_FILE
                parts += [path.name, "" if is_weights else self._hashes.sha256(path)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()
