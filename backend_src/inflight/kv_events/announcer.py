"""Announcer: from changes of the cache to the events that say so, each fact once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from inflight.kv_events.changes import CachedBlock, Change
from inflight.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheGroup,
    KvEvent,
)

CLEARED: tuple[KvEvent, ...] = (AllBlocksCleared(),)
"""What an engine says first, and last."""

_Name = tuple[bytes, str, CacheGroup | None]
"""Digest, medium and group of an announced block."""


class Announcer:
    """Knows what consumers were told. One thread uses it."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._announced: dict[_Name, CachedBlock] = {}

    def events(self, changes: Sequence[Change]) -> list[KvEvent]:
        """The events of these changes, in order; neighbours of one chain make one event."""
        run: list[CachedBlock] = []
        is_stored = False
        events: list[KvEvent] = []
        for change in changes:
            if not self._is_news(change):
                continue
            if run and not (change.is_stored == is_stored and _continues(run[-1], change)):
                events.append(self._event(run, is_stored))
                run = []
            run.append(change.block)
            is_stored = change.is_stored
        if run:
            events.append(self._event(run, is_stored))
        return events

    def changes_to(self, blocks: Iterable[CachedBlock]) -> list[Change]:
        """What has to be told so that exactly ``blocks`` (parents first) are announced.

        Removals come first, children before their parents.
        """
        wanted = {_name(block): block for block in blocks}
        gone = [block for name, block in self._announced.items() if name not in wanted]
        return [Change(block, False) for block in reversed(gone)] + [
            Change(block, True) for name, block in wanted.items() if name not in self._announced
        ]

    def _is_news(self, change: Change) -> bool:
        """False for what consumers know already."""
        name = _name(change.block)
        if change.is_stored == (name in self._announced):
            return False
        if change.is_stored:
            self._announced[name] = change.block
        else:
            del self._announced[name]
        return True

    def _event(self, run: Sequence[CachedBlock], is_stored: bool) -> KvEvent:
        hashes = tuple(_published(block.digest) for block in run)
        if not is_stored:
            return BlockRemoved(hashes, run[0].medium, run[0].group)
        parent = run[0].parent_digest
        token_ids = np.frombuffer(b"".join(block.token_ids for block in run), dtype="<i4")
        return BlockStored(
            hashes,
            None if parent is None else _published(parent),
            tuple(token_ids.tolist()),
            self._tokens_per_block,
            run[0].medium,
            run[0].group,
        )


def _name(block: CachedBlock) -> _Name:
    return block.digest, block.medium, block.group


def _continues(last: CachedBlock, change: Change) -> bool:
    block = change.block
    if (last.medium, last.group) != (block.medium, block.group):
        return False
    return not change.is_stored or block.parent_digest == last.digest


def _published(digest: bytes) -> int:
    """The low 64 bits of a block's name: routers compare these, the cache the whole of it."""
    return int.from_bytes(digest[-8:], "big")
