"""TierReporter between real tiers and whoever wants to hear of their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from inflight.api.executor_config import KvCacheConfig, KvCachePausePolicy
from inflight.kv_cache import CacheObservers, KvExtent, ObservedBlock
from inflight.kv_cache.identity import block_key
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.tiers import DiskStorage, HostStorage, KvTiers, TierCascade, TierReporter
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.cost import OnboardCost
from tests.fakes.checked_kv_store import CheckedKvStore
from tests.unit.kv_cache.tiers.tier_blocks import FINGERPRINT, SlowFiles

SIZE, NUM_BLOCKS, BLOCK_BYTES = 4, 2, 32
LEVELS = ("primary", "host", "disk")
FILE_BYTES = BlockFiles.size_of(block_key(bytes(32), np.zeros(SIZE, dtype=np.int32)), BLOCK_BYTES)
Said = tuple[str, str, int]
"""What, of which level, the block's first token."""


class Recorder:
    def __init__(self, level: str, said: list[Said]) -> None:
        self._level = level
        self._said = said

    def stored(self, block: ObservedBlock) -> None:
        self._said.append(("stored", self._level, _first_token(block)))

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        self._said += [("removed", self._level, _first_token(block)) for block in blocks]


def _first_token(block: ObservedBlock) -> int:
    return int(np.frombuffer(block.key.token_ids, dtype="<i4")[0])


class Cache:
    """Two blocks in the primary pool, as many as wanted in host memory, disk below."""

    def __init__(
        self, host_blocks: int, disk: DiskStorage | None, write_queue_bytes: int = 1 << 20
    ) -> None:
        self.said: list[Said] = []
        observers = CacheObservers(*((Recorder(level, self.said),) for level in LEVELS))
        host = HostStorage(host_blocks * BLOCK_BYTES) if host_blocks else None
        self.cascade = TierCascade(host, disk, write_queue_bytes=write_queue_bytes)
        self._store = CheckedKvStore(NUM_BLOCKS, SIZE)
        self.tiers = KvTiers(
            self.cascade,
            self._store,
            OnboardCost(BLOCK_BYTES, SIZE),
            pause_policy=KvCachePausePolicy.AUTO,
        )
        self.reporter = TierReporter(self.cascade, observers)
        self.kv = KvCacheManager(
            NUM_BLOCKS,
            KvCacheConfig(tokens_per_block=SIZE),
            observers=(self.tiers, self.reporter, *observers.primary),
        )
        self._next_id = 0

    def compute(self, *first_tokens: int) -> None:
        """A request whose blocks begin with these tokens, each a sequence of its own."""
        for first in first_tokens:
            self._next_id += 1
            tokens = block_tokens(first)
            extent = KvExtent(self._next_id, 0, tokens)
            self.kv.open(self._next_id)
            self.kv.reserve([extent])
            table = self.kv.block_table(self._next_id)
            self._store.write(table, tokens.tolist(), 0, None)
            self.kv.commit([extent])
            self.kv.close(self._next_id)

    def look_up(self, first: int) -> None:
        """A request for one more token than a block comes to its start."""
        self._next_id += 1
        tokens = np.append(block_tokens(first), np.int32(9))
        self.kv.open(self._next_id)
        while not self.tiers.prepare(self.kv, self._next_id, tokens, paused=False):
            self.tiers.wait(5.0)
        self.kv.close(self._next_id)

    def settle(self) -> None:
        assert self.cascade.wait_until_written(5.0)
        self.reporter.catch_up()

    def news(self) -> list[Said]:
        """What was said since the last call."""
        said = self.said.copy()
        self.said.clear()
        return said


def block_tokens(first: int) -> npt.NDArray[np.int32]:
    return np.arange(first, first + SIZE, dtype=np.int32)


def disk_at(folder: Path, files: BlockFiles | None = None, *, max_blocks: int = 100) -> DiskStorage:
    files = files or BlockFiles(FINGERPRINT)
    return DiskStorage(folder, max_blocks * FILE_BYTES, files, keeps_files=True)


def test_a_block_is_told_in_host_memory_before_it_is_gone_from_the_pool() -> None:
    cache = Cache(host_blocks=1, disk=None)
    cache.compute(100, 200, 300, 400)
    assert cache.news() == [
        ("stored", "primary", 100),
        ("stored", "primary", 200),
        ("stored", "host", 100),
        ("removed", "primary", 100),
        ("stored", "primary", 300),
        ("stored", "host", 200),
        ("removed", "host", 100),
        ("removed", "primary", 200),
        ("stored", "primary", 400),
    ]


def test_a_block_on_its_way_to_the_disk_is_in_host_memory_until_it_is_there(
    tmp_path: Path,
) -> None:
    files = SlowFiles()
    cache = Cache(host_blocks=1, disk=disk_at(tmp_path, files))
    cache.compute(100, 200, 300, 400)
    assert ("removed", "host", 100) not in cache.news()
    files.may_write.set()
    cache.settle()
    assert cache.news() == [("stored", "disk", 100), ("removed", "host", 100)]
    cache.cascade.close(5.0)


def test_a_disk_alone_is_told_through_its_queue(tmp_path: Path) -> None:
    cache = Cache(host_blocks=0, disk=disk_at(tmp_path))
    cache.compute(100, 200, 300)
    cache.settle()
    said = [(what, level) for what, level, first in cache.news() if first == 100]
    assert ("stored", "disk") in said
    below = [i for i, (what, level) in enumerate(said) if what == "stored" and level != "primary"]
    assert min(below) < said.index(("removed", "primary"))
    cache.cascade.close(5.0)


def test_blocks_that_the_disk_gives_up_or_cannot_read_are_told_as_gone(tmp_path: Path) -> None:
    cache = Cache(host_blocks=0, disk=disk_at(tmp_path))
    cache.compute(100, 200, 300)
    cache.settle()
    cache.news()
    for path in tmp_path.rglob("*.kvblock"):
        path.unlink()
    cache.look_up(100)
    cache.reporter.catch_up()
    assert ("removed", "disk", 100) in cache.news()
    cache.cascade.close(5.0)


def test_the_oldest_block_makes_room_on_disk_and_that_is_told(tmp_path: Path) -> None:
    cache = Cache(host_blocks=0, disk=disk_at(tmp_path, max_blocks=1))
    for first in (100, 200, 300, 400):
        cache.compute(first)
        cache.settle()
    said = cache.news()
    assert said.index(("stored", "disk", 100)) < said.index(("removed", "disk", 100))
    assert ("stored", "disk", 200) in said and ("removed", "disk", 200) not in said
    cache.cascade.close(5.0)


def test_a_block_that_the_disk_had_no_time_for_is_told_as_gone(tmp_path: Path) -> None:
    files = SlowFiles()
    cache = Cache(host_blocks=1, disk=disk_at(tmp_path, files), write_queue_bytes=BLOCK_BYTES)
    cache.compute(100, 200, 300, 400, 500)
    assert cache.cascade.num_dropped == 1
    said = cache.news()
    assert ("removed", "host", 200) in said and ("removed", "host", 100) not in said
    files.may_write.set()
    cache.settle()
    assert [each for each in cache.news() if each[2] == 200] == []
    cache.cascade.close(5.0)


def test_a_block_that_comes_back_is_in_both(tmp_path: Path) -> None:
    cache = Cache(host_blocks=10, disk=None)
    cache.compute(100, 200, 300)
    cache.news()
    cache.look_up(100)
    said = cache.news()
    assert ("stored", "primary", 100) in said and ("removed", "host", 100) not in said
    cache.compute(400, 500)
    again = [each for each in cache.news() if each[2] == 100]
    assert again == [("removed", "primary", 100)], "host memory has it still, as was told"


def test_what_an_earlier_process_left_is_told_once_it_was_in_the_pool(tmp_path: Path) -> None:
    before = Cache(host_blocks=0, disk=disk_at(tmp_path))
    before.compute(100, 200, 300)
    before.settle()
    before.cascade.close(5.0)
    cache = Cache(host_blocks=0, disk=disk_at(tmp_path))
    cache.reporter.catch_up()
    assert cache.news() == []
    cache.look_up(100)
    cache.compute(400, 500)
    said = [each for each in cache.news() if each[2] == 100]
    assert said[0] == ("stored", "primary", 100)
    assert said.index(("stored", "disk", 100)) < said.index(("removed", "primary", 100))
    cache.cascade.close(5.0)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_told_is_what_is_there(tmp_path: Path, seed: int) -> None:
    cache = Cache(host_blocks=3, disk=disk_at(tmp_path, max_blocks=4), write_queue_bytes=100)
    draw = np.random.default_rng(seed)
    for _ in range(200):
        first = 100 * int(draw.integers(1, 15))
        if draw.random() < 0.5:
            cache.compute(first)
        else:
            cache.look_up(first)
    cache.settle()
    told: dict[tuple[str, int], bool] = {}
    for what, level, first in cache.said:
        assert told.get((level, first), False) == (what == "removed"), "told twice, or out of turn"
        told[level, first] = what == "stored"
    disk, host = cache.cascade.disk, cache.cascade.host
    assert disk is not None and host is not None
    there = Counter(level for (level, _), is_there in told.items() if is_there)
    assert (there["host"], there["disk"]) == (host.usage.num_blocks, disk.usage.num_blocks)
    cache.cascade.close(5.0)
