"""EngineStore: the engines of a machine, in ``<cache_dir>/engines/<name of its key>/``.

Each is made once, by one process at a time, and whole or not there at all (``cache_folder``). Where
a checkpoint can have no engine, ``<name of its key>.none`` says why. Needs no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from inflight.cache_folder import cache_root, discard, make_once
from inflight.engine_files.header import DamagedEngineError, read_key
from inflight.engine_files.key import EngineKey

_LOG = logging.getLogger(__name__)

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
        """Whether it is there, as far as sizes and its header tell."""
        try:
            return read_key(self.folder(key)) == key
        except DamagedEngineError:
            return False

    def load(self, key: EngineKey, read: Callable[[Path], Content]) -> Content | None:
        """What ``read`` makes of its folder; None where it has to be built: it is not there, or
        damaged (``read`` raises DamagedEngineError), which is said and undone."""
        folder = self.folder(key)
        if not folder.is_dir():
            return None
        try:
            if read_key(folder) != key:
                raise DamagedEngineError("it is another engine than its name says")
            return read(folder)
        except DamagedEngineError as error:
            _LOG.warning("the built engine in %s is damaged, building it again: %s", folder, error)
            discard(folder)
            return None

    def build(
        self, key: EngineKey, build: Callable[[Path], None], *, on_wait: Callable[[], None]
    ) -> None:
        """``build`` writes the engine into an empty folder; not called when another process has
        built it meanwhile. Engines that it replaces are removed. Raises OSError, and what ``build``
        raises."""

        def make(folder: Path, lock_fd: int) -> None:
            build(folder)

        make_once(self.folder(key), make, is_made=lambda: self.has(key), on_wait=on_wait)
        self._remove_replaced(key)

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

    def _remove_replaced(self, key: EngineKey) -> None:
        for folder in self._root.iterdir():
            try:
                if folder.is_dir() and key.replaces(read_key(folder)):
                    discard(folder)
            except DamagedEngineError:
                continue  # being made, or to be found out by who needs it
