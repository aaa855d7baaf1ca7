"""TieredProgram: random programs of an engine whose KV goes down to host memory and a disk.

Whoever runs it chooses by a ``random.Random``. Everything on the way is compared with the tokens
that it stands for: the pool's cached blocks, host memory and the queue to the disk after each step,
and what a request holds by the runner, which reads all of it before each token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast
from unittest.mock import patch

import numpy as np

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCachePausePolicy,
    KvCacheRetentionConfig,
    KvTiersConfig,
    SchedulerConfig,
    TokenRangeRetentionConfig,
)
from inflight.batch.llm_request import LlmRequest
from inflight.kv_cache import KvCacheManager
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers import DiskStorage, KvTiers
from inflight.kv_cache.tiers.cascade import Place
from inflight.kv_cache.tiers.folder import FOLDER
from inflight.scheduler import capacity
from tests.fakes.arithmetic_runner import BYTES_PER_LAYER
from tests.fakes.engine_machine import Machine
from tests.fakes.stepped_disk import FaultyFiles, SteppedLoader, SteppedWriter, stepped_disks

TOKENS_PER_BLOCK = 4
BLOCK_BYTES = TOKENS_PER_BLOCK * BYTES_PER_LAYER
FILE_BYTES = 400
"""About, of a block on the disk."""


@dataclass
class Tally:
    """What programs came to, so that a test can see that they did something."""

    pauses: int = 0
    failures: int = 0
    cancelled: int = 0
    finished: int = 0
    offloaded: int = 0
    from_host: int = 0
    from_disk: int = 0
    recomputed: int = 0
    """Times that computing was measured to be faster than bringing blocks back."""
    late: int = 0
    """Loads that took longer than computing."""
    dropped: int = 0
    io_errors: int = 0
    bad_files: int = 0
    restarts: int = 0


def to_the_next_token(request: LlmRequest) -> int:
    """A request's horizon without hysteresis, so that pauses are frequent."""
    return min(request.num_tokens + 1, request.max_total_tokens)


class TieredProgram:
    """A pool for two or three requests, four at a time, prompts that begin alike."""

    def __init__(self, rng: Random, tally: Tally, folder: Path) -> None:
        self._rng = rng
        self._tally = tally
        self._folder = folder
        self._persists = rng.random() < 0.5
        self._seconds_per_step, self._readiness = rng.choice(((0.0, 0.3), (0.0, 0.3), (0.4, 0.1)))
        """A slow disk's reads take more steps, and longer ones."""
        self._is_eager = rng.random() < 0.7
        self._config = self._choose_config()
        self._start()

    def run(self, num_actions: int) -> None:
        """So many actions, a step or two after each, and the end of all requests."""
        with ExitStack() as stack:
            if self._is_eager:
                stack.enter_context(patch.object(capacity, "_horizon", to_the_next_token))
            for _ in range(num_actions):
                self._rng.choice(self._actions())()
                for _ in range(self._rng.randint(1, 3)):
                    self._step()
            self._end()
        assert self._persists or not list((self._folder / FOLDER).glob("*.kvblock"))

    def _choose_config(self) -> ExecutorConfig:
        rng = self._rng
        tiers = KvTiersConfig(
            host_memory_bytes=rng.choice((0, 0, 3, 10)) * BLOCK_BYTES,
            disk_bytes=rng.choice((5, 20, 1000)) * FILE_BYTES,
            disk_path=str(self._folder),
            disk_persist=self._persists,
            pause_policy=rng.choice(list(KvCachePausePolicy)),
        )
        policies = (CapacitySchedulerPolicy.MAX_UTILIZATION,) * 3 + tuple(CapacitySchedulerPolicy)
        return ExecutorConfig(
            max_batch_size=4,
            max_num_tokens=rng.choice((12, 40)),
            max_seq_len=36,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=rng.choice(policies)),
            kv_cache_config=KvCacheConfig(
                tokens_per_block=TOKENS_PER_BLOCK,
                num_blocks=rng.randint(9, 13),
                enable_partial_reuse=rng.random() < 0.8,
                copy_on_partial_reuse=rng.random() < 0.7,
                tiers=tiers,
            ),
        )

    def _start(self) -> None:
        with stepped_disks():
            self._machine = Machine(self._config, model_identity="model")

    def _actions(self) -> tuple[Callable[[], None], ...]:
        return (
            *(self._enqueue,) * 5,
            *(self._crowd,) * 2,
            *(self._cancel, self._fail, self._wait, self._weigh, self._damage, self._fill_disk),
            *((self._restart,) if self._persists else ()),
        )

    # What happens.

    def _enqueue(self, max_tokens: int = 8) -> None:
        rng = self._rng
        self._machine.enqueue(
            rng.randint(0, 3),
            rng.choice((rng.randint(1, 24), 17, 24)),
            rng.randint(1, max_tokens),
            priority=rng.choice((0.0, 0.5, 1.0)),
            retention=rng.choice((None, None, a_retention(rng))),
        )

    def _crowd(self) -> None:
        """More than the pool has room for, before any of them ends."""
        for _ in range(3):
            self._enqueue(max_tokens=12)

    def _cancel(self) -> None:
        self._machine.engine.inbox.cancel(self._rng.randint(1, len(self._machine.asked) + 1))

    def _fail(self) -> None:
        self._tally.failures += 1
        self._machine.fail_next = True

    def _wait(self) -> None:
        self._machine.now += self._rng.choice((0.1, 1.5))

    def _weigh(self) -> None:
        """As if it had been measured: computing is faster than bringing back, or slower."""
        cost = self._tiers.cost
        cost.context.observe(1, 1.0)
        for place in Place:
            cost.bandwidth[place].observe(BLOCK_BYTES, self._rng.choice((0.1, 100.0)))

    def _damage(self) -> None:
        """Half of what is on the disk."""
        files = sorted((self._folder / FOLDER).glob("*.kvblock"))
        for path in files[self._rng.randint(0, 1) :: 2]:
            size = path.stat().st_size
            kind = self._rng.choice(("cut", "flipped", "gone"))
            if kind == "cut":
                os.truncate(path, self._rng.randrange(size))
            elif kind == "flipped":
                content = bytearray(path.read_bytes())
                content[self._rng.randrange(size)] ^= 1
                path.write_bytes(content)
            else:
                path.unlink()

    def _fill_disk(self) -> None:
        """For some steps."""
        cast(FaultyFiles, self._disk._files).is_full = True

    def _restart(self) -> None:
        """All requests come to their ends, and another process goes on with the disk."""
        self._end()
        if self._rng.random() < 0.4:
            self._damage()
        self._tally.restarts += 1
        self._start()

    # How it goes on.

    def _step(self) -> None:
        if self._rng.random() < 0.5:
            cast(SteppedWriter, self._tiers.cascade._writer).write(self._rng.randint(1, 3))
        if self._rng.random() < 0.3:
            cast(FaultyFiles, self._disk._files).is_full = False
        self._machine.now += self._seconds_per_step
        if self._rng.random() < self._readiness:
            cast(SteppedLoader, self._tiers.cascade._loader).read()
        self._machine.step()
        self._check_contents()

    def _end(self) -> None:
        machine = self._machine
        for _ in range(3000):
            if machine.engine.num_active_requests == 0:
                break
            self._step()
        machine.check_pauses()
        machine.check()
        self._count()
        machine.engine.close()

    def _check_contents(self) -> None:
        """Whatever can be reused holds the tokens that its name says."""
        kv, runner = self._machine.engine.kv, self._machine.runner
        assert isinstance(kv, KvCacheManager)
        for block_id, key, _ in kv.cached_blocks():
            assert (runner.tokens_of(block_id) == tokens_of(key)).all()
        for key, content in self._in_memory():
            assert (content.view(np.int64) == tokens_of(key)).all()
        host = self._tiers.cascade.host
        if host is not None:
            assert host.usage.used_bytes == host.usage.num_blocks * BLOCK_BYTES
            assert host.usage.used_bytes <= host.usage.max_bytes
        assert self._disk.usage.used_bytes <= self._disk.usage.max_bytes

    def _in_memory(self) -> Iterator[tuple[BlockKey, np.ndarray]]:
        cascade = self._tiers.cascade
        if cascade.host is not None:
            for block in cascade.host._blocks.values():
                yield block.key, block.content
        for block in cast(SteppedWriter, cascade._writer).waiting.values():
            yield block.key, block.content

    @property
    def _tiers(self) -> KvTiers:
        onboarder = self._machine.engine.onboarder
        assert onboarder is not None
        return onboarder.tiers

    @property
    def _disk(self) -> DiskStorage:
        return cast(DiskStorage, self._tiers.cascade.disk)

    def _count(self) -> None:
        tally, tiers = self._tally, self._tiers
        tally.pauses += self._machine.num_recorded_pauses
        for asked in self._machine.asked.values():
            tally.cancelled += asked.finals == ["CANCELLED"]
            tally.finished += asked.finals == ["LENGTH"]
        onboarding = tiers.onboarding_stats()
        tally.recomputed += onboarding.recompute_decisions
        tally.late += onboarding.late_loads
        tally.offloaded += tiers._num_offloaded
        tally.from_host += tiers._num_onboarded[Place.HOST]
        tally.from_disk += tiers._num_onboarded[Place.DISK]
        tally.dropped += tiers.cascade.num_dropped
        tally.io_errors += self._disk.num_io_errors
        tally.bad_files += self._disk.num_bad_files


def tokens_of(key: BlockKey) -> np.ndarray:
    return np.frombuffer(key.token_ids, dtype="<i4")


def a_retention(rng: Random) -> KvCacheRetentionConfig:
    item = TokenRangeRetentionConfig(
        token_start=rng.randint(0, 4),
        priority=rng.choice((0, 35, 100)),
        duration_ms=rng.choice((None, 1000)),
    )
    return KvCacheRetentionConfig(token_range_retention_configs=(item,))
