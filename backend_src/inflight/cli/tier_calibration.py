"""Measures how fast KV blocks move into the tiers and back on this machine."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from inflight.errors import ConfigError
from inflight.kv_cache.identity import BlockKey, block_key
from inflight.kv_cache.tiers import DiskStorage, HostStorage
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.moving import BlockMemory, BlockMover
from inflight.kv_cache.tiers.storage import BlockContent, TierBlock, TierStorage
from inflight.simulator.tiers import Bandwidth

_MOVED_BYTES = 64 << 20
"""At most, each time: more than the caches of a CPU hold, and some seconds of a slow disk."""
_REPEATS = 3


def measure_host_tier(memory: BlockMemory, num_blocks: int) -> Bandwidth:
    """Between the first ``num_blocks`` blocks of ``memory`` and a HostStorage, as the engine moves
    what one iteration evicts or brings back."""
    contents = _contents(memory, num_blocks)
    keys = _keys(len(contents))
    block_ids = np.arange(len(keys), dtype=np.int32)
    mover = BlockMover(memory, contents[0].nbytes, time.perf_counter)

    def once() -> tuple[float, float]:
        storage = HostStorage(sum(content.nbytes for content in contents))

        def offload() -> None:
            for key, content in zip(keys, mover.read(block_ids.tolist()), strict=True):
                if content is not None:
                    storage.put(TierBlock(key, content))

        def onboard() -> None:
            mover.write(block_ids, [block.content for block in _found(storage, keys)])

        return _seconds(offload), _seconds(onboard)

    return _bandwidth(contents, [once() for _ in range(_REPEATS)])


def measure_disk_tier(memory: BlockMemory, num_blocks: int, folder: Path) -> Bandwidth:
    """Of a DiskStorage in a folder of its own below ``folder``, which is gone afterwards.

    What the system has not brought to the disk counts as not written, and reading begins with
    nothing of the files in memory: a tier larger than the memory that is left runs like that.
    Raises ConfigError where the folder cannot be used, or a block is not written.
    """
    contents = _contents(memory, num_blocks)
    keys = _keys(len(contents))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="inflight-calibration-", dir=folder) as below:
            seconds = [_disk_seconds(Path(below), keys, contents) for _ in range(_REPEATS)]
    except OSError as error:
        raise ConfigError(f"kv_cache_disk_path: {error.strerror}") from None
    return _bandwidth(contents, seconds)


def _disk_seconds(
    folder: Path, keys: Sequence[BlockKey], contents: Sequence[BlockContent]
) -> tuple[float, float]:
    files = BlockFiles(secrets.token_bytes(32))
    most = 2 * sum(files.size_of(k, c.nbytes) for k, c in zip(keys, contents, strict=True))
    storage = DiskStorage(folder, most, files, keeps_files=False)

    def write() -> None:
        for key, content in zip(keys, contents, strict=True):
            storage.put(TierBlock(key, content))
        for path in folder.rglob("*.kvblock"):
            _bring_to_disk(path)

    try:
        written = _seconds(write)
        if storage.usage.num_blocks < len(keys):
            raise ConfigError("kv_cache_disk_path: KV blocks could not be written there")
        return written, _seconds(lambda: _found(storage, keys))
    finally:
        storage.close()


def _bring_to_disk(path: Path) -> None:
    """And out of the system's memory, where it can be told so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _found(storage: TierStorage, keys: Sequence[BlockKey]) -> list[TierBlock]:
    blocks = [block for block in map(storage.get, keys) if block is not None]
    if len(blocks) < len(keys):
        raise ConfigError("KV tiers: blocks that were written could not be read back")
    return blocks


def _contents(memory: BlockMemory, num_blocks: int) -> list[BlockContent]:
    """Of as many blocks as are to be moved, at least one."""
    (first,) = memory.read_blocks(np.zeros(1, dtype=np.int32))
    count = max(1, min(num_blocks, _MOVED_BYTES // first.nbytes))
    return list(memory.read_blocks(np.arange(count, dtype=np.int32)))


def _keys(count: int) -> list[BlockKey]:
    """Of blocks that follow each other."""
    keys, parent = [], bytes(32)
    for number in range(count):
        keys.append(block_key(parent, np.array([number], dtype=np.int32)))
        parent = keys[-1].digest
    return keys


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _bandwidth(
    contents: Sequence[BlockContent], seconds: Sequence[tuple[float, float]]
) -> Bandwidth:
    num_bytes = sum(content.nbytes for content in contents)
    down, up = (median(of_way) for of_way in zip(*seconds, strict=True))
    return Bandwidth(num_bytes / down, num_bytes / up)
