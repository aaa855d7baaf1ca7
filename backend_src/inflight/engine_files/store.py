"""EngineStore: the engines of a machine, in ``<cache_dir>/engines/<name of its key>/``.

Each is made once, by one process at a time, and whole or not there at all (``cache_folder``). Where
a checkpoint can have no engine, ``<name of its key>.none`` says why. Needs no torch.

The modification time of an engine's header is when it was last loaded. Versions of Inflight that
share a cache keep each other's engines by it, and those that nobody uses any more go.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from inflight.cache_folder import cache_root, discard, make_once, remove_leftovers
from inflight.engine_files.header import HEADER_FILE, DamagedEngineError, read_key, reading
from inflight.engine_files.key import EngineKey
from inflight.errors import ConfigError

_LOG = logging.getLogger(__name__)

OTHER_VERSIONS_KEPT = 2
"""Of an engine, beside the one that is loaded."""
UNUSED_SECONDS = 14 * 24 * 3600.0
"""After so long without a load, an engine of another version goes."""

Content = TypeVar("Content")


class EngineStore:
    def __init__(self, cache_dir: str) -> None:
        """``cache_dir``: "" is ~/.cache/inflight; made when first needed. Raises ConfigError
        where nobody knows what ~ is."""
        self._root = cache_root(cache_dir) / "engines"

    def folder(self, key: EngineKey) -> Path:
        """Where the engine lies, if it was built."""
        return self._root / key.name

    def has(self, key: EngineKey) -> bool:
        """Whether it is there, as far as sizes and its header tell. Raises ConfigError where it
        cannot be read."""
        try:
            return read_key(self.folder(key)) == key
        except DamagedEngineError:
            return False

    def load(self, key: EngineKey, read: Callable[[Path], Content]) -> Content | None:
        """What ``read`` makes of its folder; None where it has to be built: it is not there, or
        damaged (``read`` raises DamagedEngineError), which is said and undone. Raises ConfigError
        where it is there and cannot be read; it stays then.

        The same engine as other versions of the code made it stays: ``OTHER_VERSIONS_KEPT`` of
        them, each until it has not been loaded for ``UNUSED_SECONDS``. Others are removed, and what
        killed builds have left."""
        folder = self.folder(key)
        with reading(folder):
            is_there = folder.is_dir()
        if not is_there:
            return None
        try:
            if read_key(folder) != key:
                raise DamagedEngineError("it is another engine than its name says")
            content = read(folder)
        except DamagedEngineError as error:
            _LOG.warning("the built engine in %s is damaged, building it again: %s", folder, error)
            discard(folder)
            return None
        with suppress(OSError):  # a cache that may only be read, or was emptied meanwhile
            os.utime(folder / HEADER_FILE)
        self._remove_unused_versions(key)
        remove_leftovers(self._root)
        return content

    def build(
        self, key: EngineKey, build: Callable[[Path], None], *, on_wait: Callable[[], None]
    ) -> None:
        """``build`` writes the engine into an empty folder; not called when another process has
        built it meanwhile. Raises OSError, ConfigError as ``has``, and what ``build`` raises."""

        def make(folder: Path, lock_fd: int) -> None:
            build(folder)

        make_once(self.folder(key), make, is_made=lambda: self.has(key), on_wait=on_wait)

    def reason_against(self, key: EngineKey) -> str | None:
        """Why there will be no such engine, as far as ``note_reason_against`` was told."""
        try:
            return self._note(key).read_text(encoding="utf-8")
        except OSError:
            return None

    def note_reason_against(self, key: EngineKey, reason: str) -> None:
        """Spares the next start the question; a cache that may only be read is asked again."""
        with suppress(OSError):
            self._root.mkdir(parents=True, exist_ok=True)
            self._note(key).write_text(reason, encoding="utf-8")

    def _note(self, key: EngineKey) -> Path:
        return self._root / f"{key.name}.none"

    def _remove_unused_versions(self, key: EngineKey) -> None:
        latest_first = sorted(self._other_versions(key), reverse=True)
        oldest_kept = time.time() - UNUSED_SECONDS
        for place, (loaded_at, folder) in enumerate(latest_first):
            if place >= OTHER_VERSIONS_KEPT or loaded_at < oldest_kept:
                discard(folder)

    def _other_versions(self, key: EngineKey) -> Iterator[tuple[float, Path]]:
        """When each was loaded last, in seconds since the epoch, and its folder."""
        for header in self._root.glob(f"*/{HEADER_FILE}"):
            # Damaged, unreadable or removed meanwhile: to be found out by who needs it.
            with suppress(DamagedEngineError, ConfigError, OSError):
                found = read_key(header.parent)
                is_finished = header.parent == self.folder(found)
                if is_finished and key.is_another_version_of(found):
                    yield header.stat().st_mtime, header.parent
