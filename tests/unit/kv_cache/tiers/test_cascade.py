"""TierCascade: a block's way down, and where it is found on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.kv_cache.retention import DEFAULT_RETENTION
from inflight.kv_cache.tiers.cascade import Place, TierCascade
from inflight.kv_cache.tiers.host import HostStorage
from inflight.kv_cache.tiers.storage import LazyBlock
from tests.unit.kv_cache.tiers.tier_blocks import (
    BLOCK_BYTES,
    SlowFiles,
    block_files,
    disk_storage,
    tier_block,
)


@pytest.fixture
def files() -> SlowFiles:
    return SlowFiles()


@pytest.fixture
def cascade(tmp_path: Path, files: SlowFiles) -> Iterator[TierCascade]:
    """Two blocks in host memory, three more on their way to the disk."""
    cascade = TierCascade(
        HostStorage(2 * BLOCK_BYTES),
        disk_storage(tmp_path, files=files),
        write_queue_bytes=3 * BLOCK_BYTES,
    )
    yield cascade
    files.may_write.set()
    files.may_read.set()
    cascade.close(5.0)


def test_blocks_go_from_host_memory_to_disk_and_are_found_all_the_way(
    cascade: TierCascade, files: SlowFiles
) -> None:
    blocks = [tier_block(number) for number in range(4)]
    for block in blocks:
        cascade.put(block)
    assert [cascade.place_of(block.key) for block in blocks] == [Place.HOST] * 4
    waiting = cascade.find(blocks[0].key)
    assert waiting is not None and waiting.content.tobytes() == blocks[0].content.tobytes()
    files.may_write.set()
    assert cascade.wait_until_written(5.0)
    places = [cascade.place_of(block.key) for block in blocks]
    assert places == [Place.DISK, Place.DISK, Place.HOST, Place.HOST]
    assert cascade.find(blocks[0].key) is None


def test_a_slow_disk_loses_blocks_and_never_holds_up_who_evicts(cascade: TierCascade) -> None:
    began = time.monotonic()
    for number in range(10):
        cascade.put(tier_block(number))
    assert time.monotonic() - began < 5.0, "the disk does not write at all"
    assert cascade.num_dropped == 10 - 2 - 3


def test_a_load_brings_what_is_there_up_to_the_first_miss(
    cascade: TierCascade, files: SlowFiles
) -> None:
    blocks = [tier_block(number) for number in range(4)]
    files.may_write.set()
    for block in blocks:
        cascade.put(block)
        assert cascade.wait_until_written(5.0)
    load = cascade.load([blocks[0].key, blocks[1].key, tier_block(9).key, blocks[0].key], 0.0)
    cascade.wait_for_any([load], 0.05)
    assert not load.is_done
    files.may_read.set()
    cascade.wait_for_any([load], 5.0)
    assert load.is_done and load.seconds > 0
    assert [b.content.tobytes() for b in load.blocks] == [b.content.tobytes() for b in blocks[:2]]


def test_closing_keeps_what_host_memory_held(
    cascade: TierCascade, files: SlowFiles, tmp_path: Path
) -> None:
    files.may_write.set()
    for number in range(5):
        cascade.put(tier_block(number))
        assert cascade.wait_until_written(5.0)
    cascade.close(5.0)
    assert len(block_files(tmp_path)) == 5
    again = disk_storage(tmp_path)
    for number in range(5):
        block = again.get(tier_block(number).key)
        assert block is not None and block.content.tobytes() == tier_block(number).content.tobytes()
    again.close()


def test_closing_writes_the_pool_then_host_memory_then_the_queue(
    files: SlowFiles, tmp_path: Path
) -> None:
    cascade = TierCascade(
        HostStorage(BLOCK_BYTES),
        disk_storage(tmp_path, files=files, max_blocks=3),
    )
    for number in range(4):  # 0 is being written, 1 and 2 wait, 3 is in host memory
        cascade.put(tier_block(number))
    files.may_write.set()
    pool = [LazyBlock(tier_block(8).key, DEFAULT_RETENTION, lambda: tier_block(8).content)]
    cascade.close(5.0, pool)
    again = disk_storage(tmp_path)
    found = [number for number in range(9) if again.contains(tier_block(number).key)]
    assert found == [2, 3, 8]
    again.close()


def test_a_disk_alone_takes_evicted_blocks_directly(tmp_path: Path) -> None:
    cascade = TierCascade(None, disk_storage(tmp_path, keeps_files=False))
    cascade.put(tier_block(1))
    assert cascade.wait_until_written(5.0)
    assert cascade.place_of(tier_block(1).key) is Place.DISK
    cascade.close(5.0)
    assert block_files(tmp_path) == []


def test_a_disk_that_hangs_keeps_no_users_text(files: SlowFiles, tmp_path: Path) -> None:
    """One block is written, and the next one while the cascade is closed."""
    cascade = TierCascade(None, disk_storage(tmp_path, files=files, keeps_files=False))
    files.may_write.set()
    cascade.put(tier_block(1))
    assert cascade.wait_until_written(5.0)
    files.may_write.clear()
    files.is_writing.clear()
    cascade.put(tier_block(2))
    assert files.is_writing.wait(5.0)
    assert len(block_files(tmp_path)) == 1
    cascade.close(0.05)
    assert block_files(tmp_path) == []
    files.may_write.set()
    assert cascade.wait_until_written(5.0)
    assert block_files(tmp_path) == []


def test_host_memory_alone_gives_up_for_good() -> None:
    cascade = TierCascade(HostStorage(BLOCK_BYTES), None)
    cascade.put(tier_block(1))
    cascade.put(tier_block(2))
    assert cascade.place_of(tier_block(1).key) is None
    assert cascade.place_of(tier_block(2).key) is Place.HOST
    cascade.close(1.0)
