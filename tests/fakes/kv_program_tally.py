"""Tally: what programs came to, and Tier: what they have lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.observer import ObservedBlock
from tests.fakes.checked_kv_store import CheckedKvStore


@dataclass
class Tally:
    """What programs came to, so that a test can see that they did something."""

    reused_parts: int = 0
    own_copies: int = 0
    taken_over: int = 0
    refused: int = 0
    evicted: int = 0
    pauses: int = 0
    forks: int = 0
    failures: int = 0
    onboarded: int = 0
    passed: int = 0
    """Blocks that a window has passed."""
    reused_windows: int = 0
    """Starts with a prefix whose beginning nobody holds any more."""
    steps: int = 0


class Tier:
    """A BlockObserver that keeps what is evicted, as it is when it goes."""

    def __init__(self, store: CheckedKvStore) -> None:
        self._store = store
        self._contents: dict[BlockKey, npt.NDArray[np.uint8]] = {}
        self.seen: list[tuple[str | None, list[int]]] = []
        """Salt and tokens of requests that have ended."""

    def stored(self, block: ObservedBlock) -> None:
        pass

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        ids = np.array([block.block_id for block in blocks], dtype=np.int32)
        for block, content in zip(blocks, self._store.read_blocks(ids), strict=True):
            self._contents[block.key] = content

    def contents_of(self, keys: Sequence[BlockKey]) -> list[npt.NDArray[np.uint8]]:
        """Of the first of the keys, as far as all are here."""
        known = takewhile(self._contents.__contains__, keys)
        return [self._contents[key] for key in known]
