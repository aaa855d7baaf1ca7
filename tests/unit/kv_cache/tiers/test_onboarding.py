"""KvTiers by itself: what is copied when, and what a waiting request is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from inflight.api.executor_config import KvCacheConfig, KvCachePausePolicy
from inflight.api.kv import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.kv_cache import BlockRetention, KvExtent
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention
from inflight.kv_cache.tiers import moving
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.cascade import TierCascade
from inflight.kv_cache.tiers.cost import OnboardCost
from inflight.kv_cache.tiers.disk import DiskStorage
from inflight.kv_cache.tiers.host import HostStorage
from inflight.kv_cache.tiers.onboarding import MAX_LOADS, KvTiers
from tests.fakes.checked_kv_store import CheckedKvStore
from tests.unit.kv_cache.tiers.tier_blocks import SlowFiles

SIZE, NUM_BLOCKS, BLOCK_BYTES = 4, 4, 32


class CountingStore(CheckedKvStore):
    num_reads = 0
    """Calls, of ``num_read`` blocks together."""
    num_read = 0
    num_writes = 0
    num_written = 0

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        self.num_reads += 1
        self.num_read += len(block_ids)
        return super().read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self.num_writes += 1
        self.num_written += len(block_ids)
        super().write_blocks(block_ids, contents)


class Setup:
    """A KV cache of four blocks of four tokens, with tiers of any size below it."""

    def __init__(
        self, host_bytes: int, disk: DiskStorage | None = None, store: CountingStore | None = None
    ) -> None:
        self.now = 100.0
        self.seconds_to_write = 0.0
        """A block into the pool."""
        self.store = store or CountingStore(NUM_BLOCKS, SIZE)
        host = HostStorage(host_bytes, lambda: self.now) if host_bytes else None
        self.cascade = TierCascade(host, disk)
        self.tiers = KvTiers(
            self.cascade,
            self.store,
            OnboardCost(BLOCK_BYTES, SIZE),
            pause_policy=KvCachePausePolicy.AUTO,
            clock=lambda: self.now + self.seconds_to_write * self.store.num_written,
        )
        config = KvCacheConfig(tokens_per_block=SIZE)
        self.kv = KvCacheManager(
            NUM_BLOCKS, config, clock=lambda: self.now, observers=(self.tiers,)
        )
        self._next_id = 0

    def open(self, retention: BlockRetention | None = None) -> int:
        self._next_id += 1
        self.kv.open(self._next_id, retention=retention)
        return self._next_id

    def compute(
        self, tokens: npt.NDArray[np.int32], retention: BlockRetention | None = None
    ) -> None:
        """A request of these tokens from its start to its end."""
        request_id = self.open(retention)
        start = self.kv.match_prefix(request_id, tokens).num_tokens
        extent = KvExtent(request_id, start, tokens)
        self.store.copy_blocks(*self.kv.reserve([extent])[:2])
        table = self.kv.block_table(request_id)
        self.store.write(table, tokens.tolist(), start, None)
        assert self.store.holds(table, tokens.tolist(), None)
        self.kv.commit([extent])
        self.kv.close(request_id)
        self.kv.check_integrity()

    def prepare(self, request_id: int, tokens: npt.NDArray[np.int32]) -> bool:
        return self.tiers.prepare(self.kv, request_id, tokens, paused=False)


def prompt(number: int, length: int = 13) -> npt.NDArray[np.int32]:
    return np.arange(100 * number, 100 * number + length, dtype=np.int32)


def test_a_block_is_copied_when_it_is_evicted_and_only_once() -> None:
    setup = Setup(host_bytes=100 * BLOCK_BYTES)
    setup.compute(prompt(1))
    assert setup.store.num_read == 0
    setup.compute(prompt(2))
    assert setup.store.num_read == 3, "three full blocks; the part of one is not kept"
    assert setup.prepare(setup.open(), prompt(1))
    assert setup.store.num_read == 3 + 2, "a part and two full blocks had to go for three"
    setup.compute(prompt(1))
    setup.compute(prompt(2))
    assert setup.store.num_read == 3 + 3, "each block of either prompt once"


def test_what_a_plan_evicts_is_copied_at_once_and_comes_back_at_once() -> None:
    setup = Setup(host_bytes=100 * BLOCK_BYTES)
    setup.compute(prompt(1))
    setup.compute(prompt(2))
    assert (setup.store.num_reads, setup.store.num_read) == (1, 3)
    assert setup.prepare(setup.open(), prompt(1))
    assert (setup.store.num_reads, setup.store.num_read) == (2, 5)
    assert (setup.store.num_writes, setup.store.num_written) == (1, 3)


def test_no_more_than_may_be_moved_at_once_lies_beside_the_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving, "MOVED_BYTES", 2 * BLOCK_BYTES)
    setup = Setup(host_bytes=100 * BLOCK_BYTES)
    setup.compute(prompt(1))
    setup.compute(prompt(2))
    assert (setup.store.num_reads, setup.store.num_read) == (2, 3)
    assert setup.prepare(setup.open(), prompt(1))
    assert (setup.store.num_writes, setup.store.num_written) == (2, 3)
    setup.compute(prompt(1))


class UnreadableStore(CountingStore):
    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        raise MemoryError


def test_blocks_that_cannot_be_read_are_lost_and_nothing_else_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup(host_bytes=100 * BLOCK_BYTES, store=UnreadableStore(NUM_BLOCKS, SIZE))
    setup.compute(prompt(1))
    setup.compute(prompt(2))
    assert caplog.messages == ["3 KV blocks were not read: MemoryError"]
    assert setup.cascade.host is not None and setup.cascade.host.usage.num_blocks == 0
    assert setup.prepare(setup.open(), prompt(1))
    setup.compute(prompt(1))
    assert setup.tiers.stats()[0].offloaded_bytes == 0


def test_what_came_back_is_right_and_counted() -> None:
    setup = Setup(host_bytes=100 * BLOCK_BYTES)
    setup.seconds_to_write = 0.001
    setup.compute(prompt(1))
    setup.compute(prompt(2))
    request_id = setup.open()
    assert setup.prepare(request_id, prompt(1))
    assert setup.kv.match_prefix(request_id, prompt(1)).num_tokens == 12
    setup.compute(prompt(1))
    (host,) = setup.tiers.stats()
    assert host.onboarded_bytes == 3 * BLOCK_BYTES
    assert host.offloaded_bytes == host.used_bytes == host.num_blocks * BLOCK_BYTES
    rates = setup.tiers.onboarding_stats()
    assert rates.host_bytes_per_second == pytest.approx(BLOCK_BYTES / 0.001)
    assert rates.disk_bytes_per_second is None


def said(priority: int, duration_ms: int | None = None) -> BlockRetention:
    """Of all blocks of a prompt."""
    item = TokenRangeRetentionConfig(token_start=0, priority=priority, duration_ms=duration_ms)
    return BlockRetention(KvCacheRetentionConfig(token_range_retention_configs=(item,)), 13)


def priorities(setup: Setup) -> list[int]:
    """Of the full blocks of prompt 1 that the pool has cached."""
    return [
        retention.priority
        for _, key, retention in setup.kv.cached_blocks()
        if key.token_ids[:4] in (prompt(1)[at].tobytes() for at in (0, 4, 8))
    ]


def test_a_priority_goes_down_and_comes_back_with_its_block() -> None:
    setup = Setup(host_bytes=3 * BLOCK_BYTES)
    setup.compute(prompt(1), said(80))
    for number in (2, 3, 4):
        setup.compute(prompt(number))
    assert setup.cascade.host is not None
    kept = [block.retention for block in setup.cascade.host.most_valuable_first()]
    assert kept == [Retention(80)] * 3, "those of no priority went first, though they are newer"
    assert setup.prepare(setup.open(), prompt(1))
    assert priorities(setup) == [80, 80, 80]


def test_a_duration_runs_on_in_a_tier_and_begins_anew_when_the_block_is_wanted() -> None:
    setup = Setup(host_bytes=100 * BLOCK_BYTES)
    setup.compute(prompt(1), said(80, 10_000))
    setup.now += 6.0
    setup.compute(prompt(2))
    assert setup.cascade.host is not None
    (first, *_) = setup.cascade.host.most_valuable_first()
    assert first.retention == Retention(80, 10_000, ends_at=110.0)
    setup.now += 3.0
    assert setup.prepare(setup.open(), prompt(1))
    setup.now += 9.0
    setup.kv.reserve([KvExtent(setup.open(), 0, prompt(5, 1))])
    assert priorities(setup) == [80, 80, 80], "they were wanted nine seconds ago"
    setup.now += 2.0
    assert priorities(setup) == [35, 35, 35]


def test_what_is_said_of_a_block_later_counts_in_its_tier() -> None:
    setup = Setup(host_bytes=100 * BLOCK_BYTES)
    setup.compute(prompt(1))
    setup.compute(prompt(2))
    assert setup.prepare(setup.open(), prompt(1))
    setup.compute(prompt(1), said(80))
    setup.compute(prompt(2))
    assert setup.cascade.host is not None
    kept = {
        block.key.token_ids[0]: block.retention
        for block in setup.cascade.host.most_valuable_first()
    }
    assert kept[100] == Retention(80) and kept[200] == DEFAULT_RETENTION


@pytest.fixture
def files() -> SlowFiles:
    files = SlowFiles()
    files.may_write.set()
    return files


def setup_on_disk(tmp_path: Path, files: BlockFiles) -> Setup:
    """Six prompts were computed; all but the last are on disk alone."""
    setup = Setup(0, DiskStorage(tmp_path, 1 << 20, files, keeps_files=False))
    for number in range(6):
        setup.compute(prompt(number))
        assert setup.cascade.wait_until_written(10)
    return setup


def onboarded_from_disk(setup: Setup) -> int:
    """Blocks."""
    (disk,) = setup.tiers.stats()
    return disk.onboarded_bytes // BLOCK_BYTES


def test_a_request_waits_for_the_disk_and_then_has_its_blocks(
    tmp_path: Path, files: SlowFiles
) -> None:
    setup = setup_on_disk(tmp_path, files)
    request_id = setup.open()
    assert not setup.prepare(request_id, prompt(1)) and setup.tiers.is_loading
    assert not setup.prepare(request_id, prompt(1)), "still waiting"
    files.may_read.set()
    setup.tiers.wait(10)
    assert setup.prepare(request_id, prompt(1)) and not setup.tiers.is_loading
    assert setup.kv.match_prefix(request_id, prompt(1)).num_tokens == 12
    setup.compute(prompt(1))
    assert onboarded_from_disk(setup) == 3
    setup.cascade.close(5)


def test_a_load_is_of_use_where_another_request_computed_its_beginning(
    tmp_path: Path, files: SlowFiles
) -> None:
    setup = setup_on_disk(tmp_path, files)
    request_id = setup.open()
    assert not setup.prepare(request_id, prompt(1))
    setup.compute(prompt(1)[:9])
    files.may_read.set()
    setup.tiers.wait(10)
    assert setup.prepare(request_id, prompt(1))
    assert setup.kv.match_prefix(request_id, prompt(1)).num_tokens == 12
    assert onboarded_from_disk(setup) == 1
    setup.compute(prompt(1))
    setup.cascade.close(5)


def test_a_request_gives_up_when_computing_would_have_been_done(
    tmp_path: Path, files: SlowFiles
) -> None:
    setup = setup_on_disk(tmp_path, files)
    setup.tiers.cost.context.observe(4, 1.0)  # a block a second
    request_id = setup.open()
    assert not setup.prepare(request_id, prompt(1))
    setup.now += 2.9
    assert not setup.prepare(request_id, prompt(1))
    setup.now += 0.2
    assert setup.prepare(request_id, prompt(1))
    assert setup.prepare(request_id, prompt(1)), "and does not begin to wait again"
    assert setup.tiers.onboarding_stats().late_loads == 1
    assert setup.tiers.onboarding_stats().disk_bytes_per_second == pytest.approx(96 / 3.1)
    files.may_read.set()
    setup.cascade.close(5)


def test_only_some_wait_for_the_disk_at_once_and_the_others_for_them(
    tmp_path: Path, files: SlowFiles
) -> None:
    setup = setup_on_disk(tmp_path, files)
    ids = {setup.open(): prompt(number) for number in range(5)}
    assert len(ids) == MAX_LOADS + 1
    assert not any(setup.prepare(request_id, tokens) for request_id, tokens in ids.items())
    *first, last = ids
    setup.tiers.forget_all_but([last])  # the others were cancelled
    assert not setup.tiers.is_loading
    assert not setup.prepare(last, ids[last]) and setup.tiers.is_loading
    files.may_read.set()
    setup.cascade.close(5)
