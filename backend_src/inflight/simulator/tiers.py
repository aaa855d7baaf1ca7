"""The KV tiers of a simulation: the engine's own rules, with sizes and times in place of bytes."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.api import KvCacheConfig
from inflight.engine.tiers import check_sizes
from inflight.errors import ConfigError
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers import HostStorage, KvTiers, TierCascade
from inflight.kv_cache.tiers.cascade import WRITE_QUEUE_BYTES
from inflight.kv_cache.tiers.cost import OnboardCost
from inflight.kv_cache.tiers.loading import Load
from inflight.kv_cache.tiers.storage import LazyBlock, TierBlock
from inflight.simulator.clock import SimulatedClock


class Bandwidth(NamedTuple):
    """Of a tier, in bytes a second."""

    down: float
    """Into the tier."""
    up: float
    """Out of it."""

    @classmethod
    def both(cls, speed: float) -> Bandwidth:
        """The same either way."""
        return cls(speed, speed)

    @property
    def is_possible(self) -> bool:
        return all(math.isfinite(speed) and speed > 0 for speed in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeeds:
    """What moving KV takes."""

    kv_bytes_per_token: int
    host: Bandwidth
    """Between the pool and host memory. The engine waits for it."""
    disk: Bandwidth
    """Read and written beside each other and beside the engine."""

    def __post_init__(self) -> None:
        for key in ("host", "disk"):
            bandwidth: Bandwidth = getattr(self, key)
            if not bandwidth.is_possible:
                raise ConfigError(
                    f"--kv-cache-{key}-bandwidth: {bandwidth.down!r} must be larger than 0"
                )


class SimulatedTiers:
    """``kv_tiers`` as the engine has them, but for what moves bytes: that takes simulated time."""

    def __init__(self, config: KvCacheConfig, speeds: TierSpeeds, clock: SimulatedClock) -> None:
        """``config.tiers`` exist. Raises ConfigError where one holds no block."""
        tiers = config.tiers
        block_bytes = speeds.kv_bytes_per_token * config.tokens_per_block
        check_sizes(tiers, block_bytes)
        host = HostStorage(tiers.host_memory_bytes, clock) if tiers.host_memory_bytes else None
        disk = SimulatedDisk(tiers.disk_bytes, clock) if tiers.disk_bytes else None
        self._reader: SimulatedReader | None = None
        writer: SimulatedWriter | None = None
        if disk is not None:
            writer = SimulatedWriter(disk, speeds.disk.down, clock)
            self._reader = SimulatedReader(disk, block_bytes / speeds.disk.up, clock)
        self.kv_tiers = KvTiers(
            TierCascade(host, disk, writer=writer, loader=self._reader),
            _TimedMemory(block_bytes, speeds.host, clock),
            OnboardCost(block_bytes, config.tokens_per_block),
            pause_policy=tiers.pause_policy,
            onboards=tiers.onboard_blocks,
            clock=clock,
        )

    def settle(self) -> None:
        """What was read from the disk until now is there; to be called when the clock moved."""
        if self._reader is not None:
            self._reader.settle()


class _TimedMemory:
    """The pool's side of a move: blocks of zeros that all are the same bytes, and time."""

    def __init__(self, block_bytes: int, bandwidth: Bandwidth, clock: SimulatedClock) -> None:
        self._block_bytes = block_bytes
        self._bandwidth = bandwidth
        self._clock = clock

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        self._clock.now += self._block_bytes / self._bandwidth.down * len(block_ids)
        return [np.broadcast_to(np.uint8(0), self._block_bytes)] * len(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self._clock.now += self._block_bytes / self._bandwidth.up * len(block_ids)


class SimulatedDisk(HostStorage):
    """A SlowStorage that gives up blocks as a disk does."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        super().__init__(max_bytes, clock)
        self.on_lost: Callable[[bytes], None] = lambda digest: None
        self.written_bytes = 0
        self.num_io_errors = 0
        self.num_bad_files = 0

    def put(self, block: TierBlock) -> Sequence[TierBlock]:
        is_new = not self.contains(block.key)
        given_up = super().put(block)
        for old in given_up:
            if old.key != block.key:
                self.on_lost(old.key.digest)
        if is_new and self.contains(block.key):
            self.written_bytes += block.content.nbytes
        return [old for old in given_up if old.key == block.key]

    def close(self, blocks: Iterable[LazyBlock], deadline: float) -> int:
        """Nothing outlives a simulation."""
        return 0

    def abandon(self) -> None:
        """Nothing hangs in a simulation."""


class SimulatedWriter:
    """A BlockWriter: what was offered is on disk when the disk has had time for it."""

    def __init__(self, disk: SimulatedDisk, bytes_per_second: float, clock: SimulatedClock) -> None:
        self._disk = disk
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._waiting: OrderedDict[bytes, tuple[TierBlock, float]] = OrderedDict()
        """By digest, with the time at which it is written; in order of that."""
        self._waiting_bytes = 0
        self._free_at = 0.0

    def offer(self, block: TierBlock) -> bool:
        self._settle(self._clock.now)
        digest, size = block.key.digest, block.content.nbytes
        if digest in self._waiting:
            return True
        if self._waiting and self._waiting_bytes + size > WRITE_QUEUE_BYTES:
            return False
        self._free_at = max(self._free_at, self._clock.now) + size / self._bytes_per_second
        self._waiting[digest] = (block, self._free_at)
        self._waiting_bytes += size
        return True

    def find(self, key: BlockKey) -> TierBlock | None:
        self._settle(self._clock.now)
        waiting = self._waiting.get(key.digest)
        return waiting[0] if waiting is not None and waiting[0].key == key else None

    def wait_until_written(self, timeout: float) -> bool:
        self._settle(self._clock.now + timeout)
        return not self._waiting

    def close(self, timeout: float) -> Sequence[TierBlock]:
        return [block for block, _ in self._waiting.values()]

    def _settle(self, now: float) -> None:
        while self._waiting:
            digest, (block, written_at) = next(iter(self._waiting.items()))
            if written_at > now:
                break
            del self._waiting[digest]
            self._waiting_bytes -= block.content.nbytes
            self._disk.put(block)


class SimulatedReader:
    """A BlockReader: loads are read one after the other, each block in the same time."""

    def __init__(
        self, disk: SimulatedDisk, seconds_per_block: float, clock: SimulatedClock
    ) -> None:
        self._disk = disk
        self._seconds_per_block = seconds_per_block
        self._clock = clock
        self._loads: deque[Load] = deque()
        self._free_at = 0.0

    def start(self, keys: Sequence[BlockKey], now: float) -> Load:
        load = Load(keys, now)
        self._loads.append(load)
        return load

    def wait(self, loads: Sequence[Load], timeout: float) -> None:
        """Moves the clock, as nothing else would."""
        self.settle()
        if not any(load.is_done for load in loads):
            ends = self._end_of(self._loads[0]) if self._loads else math.inf
            self._clock.now = min(ends, self._clock.now + timeout)
            self.settle()

    def close(self, timeout: float) -> None:
        self._loads.clear()

    def settle(self) -> None:
        """Whatever is read by now is done."""
        self._loads = deque(
            load for number, load in enumerate(self._loads) if number == 0 or not load.is_cancelled
        )
        while self._loads:
            load, end = self._loads[0], self._end_of(self._loads[0])
            if load.is_cancelled:
                self._free_at = max(self._free_at, min(end, self._clock.now))
            elif end > self._clock.now:
                break
            else:
                self._free_at = end
                self._read(load)
            self._loads.popleft()
            load.is_done = True

    def _end_of(self, load: Load) -> float:
        return max(load.began, self._free_at) + len(load.keys) * self._seconds_per_block

    def _read(self, load: Load) -> None:
        for key in load.keys:
            block = self._disk.get(key)
            if block is None:
                break
            load.blocks.append(block)
        load.seconds = len(load.blocks) * self._seconds_per_block
