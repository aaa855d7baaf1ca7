"""DiskStorage: exact or a miss, whatever happens to its files."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.disk import DiskStorage
from inflight.kv_cache.tiers.folder import FOLDER
from inflight.kv_cache.tiers.storage import LazyBlock
from tests.unit.kv_cache.tiers.tier_blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    FINGERPRINT,
    FailingFiles,
    block_files,
    disk_storage,
    tier_block,
)


def test_what_was_put_comes_back_byte_for_byte(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    blocks = [tier_block(number) for number in range(5)]
    for block in blocks:
        assert storage.put(block) == ()
    for block in blocks:
        found = storage.get(block.key)
        assert found is not None and found.content.tobytes() == block.content.tobytes()
    assert storage.usage.num_blocks == 5
    assert storage.usage.used_bytes == sum(p.stat().st_size for p in block_files(tmp_path))


def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1))
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    for path in (tmp_path / FOLDER).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(mode=0o700)
    (tmp_path / FOLDER).chmod(0o750)
    with pytest.raises(ConfigError, match="kv_cache_disk_path"):
        disk_storage(tmp_path)


def test_one_process_at_a_time_uses_the_folder(tmp_path: Path) -> None:
    first = disk_storage(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        disk_storage(tmp_path)
    first.close()
    disk_storage(tmp_path).close()


def test_the_block_used_longest_ago_is_given_up_by_bytes(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path, max_blocks=2)
    storage.put(tier_block(1))
    storage.put(tier_block(2))
    assert storage.get(tier_block(1).key) is not None
    storage.put(tier_block(3))
    assert [storage.contains(tier_block(n).key) for n in (1, 2, 3)] == [True, False, True]
    assert len(block_files(tmp_path)) == 2
    assert storage.usage.used_bytes == 2 * FILE_BYTES


def test_a_restart_finds_the_blocks_and_their_order_of_use(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    for number in (1, 2, 3):
        storage.put(tier_block(number))
        os.utime(storage._path(tier_block(number).key.digest), ns=(number, number))
    assert storage.get(tier_block(1).key) is not None  # used again, so 2 is the oldest
    storage.close()
    again = disk_storage(tmp_path, max_blocks=2)
    assert [again.contains(tier_block(n).key) for n in (1, 2, 3)] == [True, False, True]
    found = again.get(tier_block(3).key)
    assert found is not None and found.content.tobytes() == tier_block(3).content.tobytes()


def test_without_persistence_nothing_is_left_and_nothing_is_found(tmp_path: Path) -> None:
    kept = disk_storage(tmp_path)
    kept.put(tier_block(1))
    kept.close()
    storage = disk_storage(tmp_path, keeps_files=False)
    assert not storage.contains(tier_block(1).key) and block_files(tmp_path) == []
    storage.put(tier_block(2))
    storage.close()
    assert block_files(tmp_path) == []


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("size", [0, 3, 100, FILE_BYTES - BLOCK_BYTES, FILE_BYTES - 1])
def test_a_truncated_file_is_a_miss(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1))
    os.truncate(block_files(tmp_path)[0], size)
    with caplog.at_level(logging.WARNING):
        assert storage.get(tier_block(1).key) is None
    assert "cut short" in caplog.text
    assert not storage.contains(tier_block(1).key) and block_files(tmp_path) == []
    assert storage.num_bad_files == 1


def test_any_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    block = tier_block(1)
    for offset in [*range(FILE_BYTES - BLOCK_BYTES), FILE_BYTES - BLOCK_BYTES, FILE_BYTES - 1]:
        storage.put(block)
        flip_bit(block_files(tmp_path)[0], offset)
        assert storage.get(block.key) is None, f"byte {offset}"
    assert storage.num_bad_files == FILE_BYTES - BLOCK_BYTES + 2
    assert storage.usage.used_bytes == 0


def test_bytes_behind_the_end_are_a_miss(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1))
    with block_files(tmp_path)[0].open("ab") as file:
        file.write(b"x")
    assert storage.get(tier_block(1).key) is None


def test_a_file_under_the_name_of_another_block_is_a_miss(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1))
    storage.put(tier_block(2))
    os.replace(storage._path(tier_block(1).key.digest), storage._path(tier_block(2).key.digest))
    assert storage.get(tier_block(2).key) is None
    assert storage.get(tier_block(1).key) is None


def test_other_tokens_with_the_digest_are_a_miss(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    block = tier_block(1)
    storage.put(block)
    forged = block.key._replace(token_ids=tier_block(2).key.token_ids)
    assert storage.get(forged) is None


def test_a_file_that_vanished_is_a_plain_miss(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1))
    block_files(tmp_path)[0].unlink()
    assert storage.get(tier_block(1).key) is None
    assert storage.num_bad_files == storage.num_io_errors == 0


def test_a_restart_drops_what_it_cannot_use_and_touches_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = disk_storage(tmp_path)
    for number in range(4):
        storage.put(tier_block(number))
    storage.close()
    folder = tmp_path / FOLDER
    os.truncate(storage._path(tier_block(0).key.digest), 500)
    flip_bit(storage._path(tier_block(1).key.digest), 2)
    (folder / ("ab" * 32 + ".kvblock-unfinished")).write_bytes(b"half")
    (folder / "notes.txt").write_text("somebody's")
    with caplog.at_level(logging.WARNING):
        again = disk_storage(tmp_path)
    assert [again.contains(tier_block(n).key) for n in range(4)] == [False, False, True, True]
    assert again.num_bad_files == 2 and "is not used" in caplog.text
    assert len(block_files(tmp_path)) == 3 and (folder / "notes.txt").exists()


def test_blocks_of_an_older_version_are_a_miss_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 1 had no digest of the block before, and no retention."""
    storage = disk_storage(tmp_path)
    block, path = tier_block(1), storage._path(tier_block(1).key.digest)
    storage.close()
    fields = struct.pack(
        "<8sI32s32sIIQ", b"INFLKVB\n", 1, FINGERPRINT, block.key.digest, 16, 0, 1000
    )
    body = block.key.token_ids + block.content.tobytes()
    path.write_bytes(fields + hashlib.sha256(fields + body).digest() + body)
    with caplog.at_level(logging.WARNING):
        again = disk_storage(tmp_path)
    assert again.get(block.key) is None and block_files(tmp_path) == []
    assert again.num_bad_files == 1 and "of this version" in caplog.text


def test_what_was_said_of_a_block_last_is_there_after_a_restart(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    for number in (1, 2, 3):
        storage.put(tier_block(number)._replace(retention=Retention(80, 60_000)))
    storage.renew(tier_block(2).key, Retention(7))
    storage.renew(tier_block(9).key, Retention(7))
    storage.renew(tier_block(3).key, Retention(80, 1))
    time.sleep(0.002)
    storage.close(deadline=time.monotonic() + 10)
    again = disk_storage(tmp_path)
    found = [again.get(tier_block(number).key) for number in (1, 2, 3)]
    assert [block and block.retention[:2] for block in found] == [
        (80, 60_000),
        (7, None),
        (35, None),
    ]
    assert again.num_bad_files == 0


def test_a_kill_leaves_what_was_said_first(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1)._replace(retention=Retention(80)))
    storage.renew(tier_block(1).key, Retention(7))
    os.close(storage._lock_file)
    block = disk_storage(tmp_path).get(tier_block(1).key)
    assert block is not None and block.retention == Retention(80)


def test_blocks_of_another_model_are_never_used(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1))
    storage.close()
    other = disk_storage(tmp_path, files=BlockFiles(b"g" * 32))
    assert other.get(tier_block(1).key) is None
    assert other.num_bad_files == 1


def test_salts_stay_apart_over_a_restart(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    storage.put(tier_block(1, salt="a"))
    storage.close()
    again = disk_storage(tmp_path)
    assert again.get(tier_block(1, salt="b").key) is None
    assert again.get(tier_block(1).key) is None
    assert again.get(tier_block(1, salt="a").key) is not None


def test_a_full_disk_is_counted_and_leaves_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles()
    storage = disk_storage(tmp_path, files=files)
    storage.put(tier_block(1))
    files.is_full = True
    with caplog.at_level(logging.WARNING):
        for number in range(2, 12):
            assert storage.put(tier_block(number)) == ()
    assert storage.num_io_errors == 10
    assert [r.message for r in caplog.records if "No space left" in r.message][-1].endswith("8)")
    assert len(caplog.records) == 4, "the 1st, 2nd, 4th and 8th time"
    assert storage.usage.num_blocks == 1 and storage.get(tier_block(1).key) is not None
    files.is_full = False
    storage.put(tier_block(2))
    assert storage.get(tier_block(2).key) is not None


def test_a_disk_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    files = FailingFiles()
    storage = disk_storage(tmp_path, files=files)
    storage.put(tier_block(1))
    files.is_unreadable = True
    assert storage.get(tier_block(1).key) is None
    assert storage.num_io_errors == 1 and not storage.contains(tier_block(1).key)


def kept(storage: DiskStorage, numbers: Sequence[int], *, seconds: float = 10.0) -> int:
    """By the end of the storage, in this order of value."""
    blocks = [
        LazyBlock(block.key, block.retention, lambda block=block: block.content)  # type: ignore[misc]
        for block in map(tier_block, numbers)
    ]
    return storage.close(blocks, time.monotonic() + seconds)


def test_what_is_kept_takes_the_place_of_the_rest_and_the_first_count_as_used_last(
    tmp_path: Path,
) -> None:
    storage = disk_storage(tmp_path, max_blocks=4)
    for number in (1, 2, 3, 4):
        storage.put(tier_block(number))
    assert kept(storage, [7, 2, 7, 8, 9, 5]) == 4
    whole = disk_storage(tmp_path)
    assert [whole.contains(tier_block(n).key) for n in (7, 2, 8, 9)] == [True] * 4
    assert whole.usage.num_blocks == 4
    whole.close()
    again = disk_storage(tmp_path, max_blocks=2)
    assert [again.contains(tier_block(n).key) for n in (7, 2, 8, 9)] == [True, True, False, False]


def test_keeping_ends_when_its_time_is_over(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    assert kept(storage, [1, 2], seconds=0.0) == 0
    assert block_files(tmp_path) == []


def test_a_disk_that_refuses_a_block_is_asked_to_keep_no_more(tmp_path: Path) -> None:
    files = FailingFiles()
    storage = disk_storage(tmp_path, files=files)
    storage.put(tier_block(1))
    files.is_full = True
    assert kept(storage, [1, 2, 3]) == 1
    assert storage.num_io_errors == 1


def test_a_block_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    storage = disk_storage(tmp_path)
    lost = LazyBlock(tier_block(1).key, DEFAULT_RETENTION, lambda: None)
    there = LazyBlock(tier_block(2).key, DEFAULT_RETENTION, lambda: tier_block(2).content)
    assert storage.close([lost, there], time.monotonic() + 10) == 1


WRITER = """
import sys
from pathlib import Path
from tests.unit.kv_cache.tiers.tier_blocks import disk_storage, tier_block
from inflight.kv_cache.tiers.write_behind import WriteBehind
storage = disk_storage(Path(sys.argv[1]), max_blocks=100_000)
writer = WriteBehind(storage, 1 << 30, on_left=lambda digest: None)
for number in range(100_000):
    writer.offer(tier_block(number))
    if number == 200:
        print("writing", flush=True)
"""


def test_a_kill_during_write_behind_leaves_only_whole_blocks(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        deadline = time.monotonic() + 20
        while len(block_files(tmp_path)) < 50 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
    storage = disk_storage(tmp_path, max_blocks=100_000)
    assert storage.num_bad_files == 0
    found = [n for n in range(2000) if storage.contains(tier_block(n).key)]
    assert len(found) >= 49
    for number in found:
        block = storage.get(tier_block(number).key)
        assert block is not None and block.content.tobytes() == tier_block(number).content.tobytes()
