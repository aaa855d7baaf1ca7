"""What each tier gives up against the rule, restated over a plain list: of the blocks that no other
of the tier follows, the one of the lowest priority, and of those the one used longest ago."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.kv_cache.identity import BlockKey, PrefixIdentity, block_key
from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention
from inflight.kv_cache.tiers import DiskStorage, HostStorage
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.storage import LazyBlock, TierBlock, TierStorage
from inflight.simulator.tiers import SimulatedDisk

BLOCK_BYTES = 8
ROOMS = 4
FINGERPRINT = bytes(32)


def keys_of(branch: int, length: int) -> list[BlockKey]:
    """Of a sequence of one-token blocks; branches have their first two in common."""
    keys, parent = [], PrefixIdentity().root_digest()
    for index in range(length):
        token = index if index < 2 else 100 * branch + index
        keys.append(block_key(parent, np.array([token], dtype=np.int32)))
        parent = keys[-1].digest
    return keys


KEYS = [key for branch in range(3) for key in keys_of(branch, 4)]


@dataclass
class Kept:
    key: BlockKey
    retention: Retention
    since: float
    """When its duration began."""

    def left(self, now: float) -> Retention:
        duration_ms = self.retention.duration_ms
        is_over = duration_ms is not None and now >= self.since + duration_ms / 1000
        return DEFAULT_RETENTION if is_over else self.retention


class Model:
    """The rule, written down. ``kept`` is in the order of use."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []

    def find(self, key: BlockKey) -> Kept | None:
        return next((each for each in self.kept if each.key == key), None)

    def use(self, key: BlockKey, now: float, retention: Retention | None = None) -> None:
        """``retention``: None, what counts goes on to count."""
        kept = self.find(key)
        if kept is None:
            return
        self.kept.remove(kept)
        self.kept.append(Kept(key, retention or kept.left(now), now))

    def put(self, key: BlockKey, retention: Retention, now: float) -> None:
        if self.find(key) is not None:
            self.use(key, now, retention)
            return
        self.kept.append(Kept(key, retention, now))
        while len(self.kept) > ROOMS:
            parents = {each.key.parent_digest for each in self.kept}
            leaves = [each for each in self.kept if each.key.digest not in parents]
            self.kept.remove(min(leaves, key=lambda each: each.left(now).priority))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def a_retention(rng: Random) -> Retention:
    return Retention(rng.choice((0, 34, 35, 36, 100)), rng.choice((None, None, 0, 1000, 5000)))


def content_of(key: BlockKey) -> npt.NDArray[np.uint8]:
    return np.frombuffer(key.digest, dtype=np.uint8, count=BLOCK_BYTES)


def run_program(
    rng: Random, storage: TierStorage, clock: Clock, restart: Callable[[], TierStorage] | None
) -> None:
    """``restart``: what comes after the storage, which it has closed."""
    model = Model()
    for _ in range(40):
        key, step = rng.choice(KEYS), rng.random()
        if step < 0.6:
            retention = a_retention(rng)
            storage.put(TierBlock(key, content_of(key), retention))
            model.put(key, retention, clock.now)
        elif step < 0.75:
            block, kept = storage.get(key), model.find(key)
            assert (block is None) == (kept is None)
            if block is not None and kept is not None:
                assert block.content.tobytes() == content_of(key).tobytes()
                model.use(key, clock.now)
                assert block.retention[:2] == model.kept[-1].retention[:2]
        elif step < 0.85:
            retention = a_retention(rng)
            storage.renew(key, retention)
            model.use(key, clock.now, retention)
        elif step < 0.95 or restart is None:
            clock.now += rng.choice((0.5, 2.0))
        else:
            storage = restart()
        held = {key for key in KEYS if storage.contains(key)}
        assert held == {each.key for each in model.kept}
        assert storage.usage.num_blocks == len(held) <= ROOMS


@contextmanager
def a_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_host_memory_and_the_simulated_disk(rng: Random, simulated: bool) -> None:
    clock = Clock()
    make = SimulatedDisk if simulated else HostStorage
    run_program(rng, make(ROOMS * BLOCK_BYTES, clock), clock, None)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_disk_also_through_restarts(rng: Random) -> None:
    clock = Clock()
    max_bytes = ROOMS * BlockFiles.size_of(KEYS[0], BLOCK_BYTES)
    with a_folder() as folder, pytest.MonkeyPatch.context() as patch:
        # The clock of files is the engine's here, so that the end of a duration is exact.
        patch.setattr("inflight.kv_cache.tiers.disk.time.time", lambda: 1e9 + clock.now)

        def make() -> DiskStorage:
            files = BlockFiles(FINGERPRINT)
            return DiskStorage(folder, max_bytes, files, keeps_files=True, clock=clock)

        storages = [make()]

        def restart() -> DiskStorage:
            storages[-1].close(deadline=float("inf"))
            storages.append(make())
            return storages[-1]

        run_program(rng, storages[0], clock, restart)
        storages[-1].close()


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_end_keeps_the_first_of_what_it_is_offered(rng: Random) -> None:
    """A block that finds no room among what is worth more ends the writing for those of its
    priority and below; what is on disk already stays with what was said of it last."""
    offered = sorted(
        ((key, Retention(rng.choice((0, 35, 80)))) for key in KEYS[:4] + KEYS[6:8]),
        key=lambda block: -block[1].priority,
    )
    max_bytes = ROOMS * BlockFiles.size_of(KEYS[0], BLOCK_BYTES)
    with a_folder() as folder:
        files = BlockFiles(FINGERPRINT)
        disk = DiskStorage(folder, max_bytes, files, keeps_files=True)
        for key in rng.sample(KEYS, 6):
            disk.put(TierBlock(key, content_of(key), Retention(rng.choice((0, 35, 80)))))
        before = {key for key, _ in offered if disk.contains(key)}
        lazy = [LazyBlock(key, said, partial(content_of, key)) for key, said in offered]
        num_kept = disk.close(lazy, float("inf"))
        again = DiskStorage(folder, max_bytes, files, keeps_files=True)
        found = {key: again.get(key) for key, _ in offered}
        again.close()
    refused: int | None = None
    for key, said in offered:
        block = found[key]
        if block is not None:
            assert (block.key, block.retention) == (key, said)
            assert key in before or refused is None or said.priority > refused
        elif refused is None:
            refused = said.priority
    assert sum(block is not None for block in found.values()) == num_kept > 0
