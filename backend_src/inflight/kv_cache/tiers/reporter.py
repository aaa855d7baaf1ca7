"""TierReporter: tells observers which blocks are in which tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inflight.kv_cache.observer import BlockObserver, CacheObservers, ObservedBlock
from inflight.kv_cache.tiers.cascade import Place, TierCascade


class _Told(NamedTuple):
    block: ObservedBlock
    places: frozenset[Place]


class TierReporter:
    """Compares where blocks are with what observers know, and tells the difference: first where a
    block is now, then where it is no more. On the engine thread, whoever moved the block.

    A BlockObserver: it learns from evictions what an observer must be told of a block. So a file
    of an earlier process is told once its block was in the primary pool again.
    """

    def __init__(self, cascade: TierCascade, observers: CacheObservers) -> None:
        self._cascade = cascade
        self._observers: dict[Place, Sequence[BlockObserver]] = {
            Place.HOST: observers.host,
            Place.DISK: observers.disk,
        }
        self._told: dict[bytes, _Told] = {}
        """By digest; of blocks that are in a tier."""
        cascade.keep_moved()

    def stored(self, block: ObservedBlock) -> None:
        """The primary pool's affair."""

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        """Called when the tiers have taken the blocks, and before observers of the primary pool
        hear that they are gone there."""
        for block in blocks:
            self._told.setdefault(block.key.digest, _Told(block, frozenset()))
        self.catch_up()
        for block in blocks:
            self._compare(block.key.digest)

    def catch_up(self) -> None:
        """Tells what other threads have moved, written and lost meanwhile."""
        for digest in self._cascade.take_moved():
            self._compare(digest)

    def _compare(self, digest: bytes) -> None:
        told = self._told.get(digest)
        if told is None:
            return
        places = self._cascade.places_of(told.block.key)
        for place in Place:
            if place in places - told.places:
                for observer in self._observers[place]:
                    observer.stored(told.block)
        for place in Place:
            if place in told.places - places:
                for observer in self._observers[place]:
                    observer.removed((told.block,))
        if places:
            self._told[digest] = told._replace(places=places)
        else:
            del self._told[digest]
