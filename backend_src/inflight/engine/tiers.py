"""The engine's use of KV tiers: making them, and asking them before each plan."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from inflight.api.executor_config import ExecutorConfig, KvCacheConfig, KvTiersConfig
from inflight.api.stats import KvCacheStats
from inflight.batch.llm_request import LlmRequest
from inflight.batch.plan import ScheduledBatch
from inflight.engine.book import RequestBook
from inflight.errors import ConfigError
from inflight.kv_cache import CacheObservers, KvCacheManager
from inflight.kv_cache.tiers import (
    DiskStorage,
    HostStorage,
    KvTiers,
    TierCascade,
    TierReporter,
)
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.cost import OnboardCost
from inflight.model.runner import ModelRunner

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 3.0
"""Seconds for what is still to be written when the engine ends; the server has 5 for its end."""
LEAST_MEASURED_TOKENS = 128
"""Context tokens of an iteration that tells how fast contexts are; with 32 SmolLM2-135M seemed to
be a third as fast as with 512."""
LONGEST_PAUSE = 0.005
"""Seconds that an engine with nothing else to do waits for a disk before it looks again for new
requests and cancellations."""


def make_tiers(
    runner: ModelRunner,
    config: KvCacheConfig,
    *,
    model_identity: str | None,
    clock: Callable[[], float],
) -> KvTiers | None:
    """None where none is configured. ``runner`` has its KV cache; ``model_identity``: see Engine.

    Raises ConfigError where the disk tier's folder cannot be used, or a tier holds no block.
    """
    tiers = config.tiers
    if not tiers.exist:
        return None
    block_bytes = runner.spec.kv_bytes_per_token * config.tokens_per_block
    _check_sizes(tiers, block_bytes)
    disk = None
    if tiers.disk_bytes:
        fingerprint = _fingerprint(runner, block_bytes, model_identity, tiers)
        disk = DiskStorage(
            Path(tiers.disk_path),
            tiers.disk_bytes,
            BlockFiles(fingerprint),
            keeps_files=tiers.disk_persist,
        )
    host = HostStorage(tiers.host_memory_bytes) if tiers.host_memory_bytes else None
    logger.info(
        "KV tiers: %d MiB of host memory, %d MiB on disk, holding %d blocks",
        tiers.host_memory_bytes >> 20,
        tiers.disk_bytes >> 20,
        0 if disk is None else disk.usage.num_blocks,
    )
    return KvTiers(
        TierCascade(host, disk, persists=tiers.disk_persist),
        runner,
        OnboardCost(block_bytes, config.tokens_per_block),
        pause_policy=tiers.pause_policy,
        onboards=tiers.onboard_blocks,
        clock=clock,
    )


def make_reporter(tiers: KvTiers | None, observers: CacheObservers) -> TierReporter | None:
    """None where nobody wants to hear of tiers, or there are none."""
    if tiers is None or not (observers.host or observers.disk):
        return None
    return TierReporter(tiers.cascade, observers)


def _check_sizes(tiers: KvTiersConfig, block_bytes: int) -> None:
    for key in ("host_memory_bytes", "disk_bytes"):
        size = getattr(tiers, key)
        if 0 < size < block_bytes:
            raise ConfigError(f"kv_cache_{key}: {size} holds no KV block; one has {block_bytes}")


def _fingerprint(
    runner: ModelRunner, block_bytes: int, model_identity: str | None, tiers: KvTiersConfig
) -> bytes:
    if model_identity is None:
        if tiers.disk_persist:
            raise ConfigError("kv_cache_disk_persist: needs a checkpoint that can be told apart")
        model_identity = secrets.token_hex(32)  # of this process alone
    facts = (model_identity, runner.kv_block_format, str(block_bytes))
    return hashlib.sha256("\0".join(facts).encode()).digest()


class Onboarder:
    """Called by the loop on its thread, between two forwards."""

    def __init__(
        self,
        tiers: KvTiers,
        kv: KvCacheManager,
        config: ExecutorConfig,
        reporter: TierReporter | None,
    ) -> None:
        """``reporter``: observes ``kv`` after ``tiers``."""
        self.tiers = tiers
        self._reporter = reporter
        self._kv = kv
        self._max_batch_size = config.max_batch_size
        self._least_measured = min(LEAST_MEASURED_TOKENS, config.max_num_tokens // 2)

    def ready_to_start(self, book: RequestBook) -> Collection[LlmRequest]:
        """The waiting requests that the scheduler may start, in rank order: all but those that wait
        for a disk. What host memory holds of the first ones is in the cache when this returns.

        Only for requests that could start now is anything brought back: as many as there are slots
        and free blocks for.
        """
        if self._reporter is not None:
            self._reporter.catch_up()
        num_slots = self._max_batch_size - len(book.started)
        room = self._kv.num_free_blocks
        asked: list[int] = []
        held_back: set[int] = set()
        for llm in book.waiting:
            room -= -(-llm.num_tokens // self._kv.tokens_per_block)
            if room < 0 or len(asked) - len(held_back) >= num_slots:
                break
            asked.append(llm.request_id)
            paused = llm.num_pauses > 0
            if not self.tiers.prepare(self._kv, llm.request_id, llm.token_ids, paused=paused):
                held_back.add(llm.request_id)
        self.tiers.forget_all_but(asked)
        if not held_back:
            return book.waiting
        return [llm for llm in book.waiting if llm.request_id not in held_back]

    def observe(self, plan: ScheduledBatch, seconds: float) -> None:
        """Learns what computing context tokens takes from iterations that did little else, and
        enough of it: the weights are read once however few tokens there are, and onboarding does
        not save that."""
        num_rows = plan.num_context_tokens + len(plan.generation)
        if plan.num_context_tokens >= max(self._least_measured, num_rows // 2):
            self.tiers.cost.context.observe(num_rows, seconds)

    def add_to(self, stats: KvCacheStats) -> KvCacheStats:
        """The primary pool's statistics with those of the tiers. Safe from any thread."""
        return replace(stats, tiers=self.tiers.stats(), onboarding=self.tiers.onboarding_stats())

    def wait(self) -> bool:
        """With nothing else to do: waits a moment for the disk. False: nobody waits for it."""
        if self.tiers.is_loading:
            self.tiers.wait(LONGEST_PAUSE)
            return True
        return False

    def close(self, *, is_sound: bool) -> None:
        """Writes what outlives the process, for a while. ``is_sound``: see ``Engine.close``."""
        self.tiers.close(CLOSE_TIMEOUT, self._kv if is_sound else None)
