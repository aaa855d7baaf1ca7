"""Onboarder: the engine asks the KV tiers before each plan, and tells them what it measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from inflight.api.executor_config import ExecutorConfig
from inflight.api.stats import KvCacheStats
from inflight.batch.llm_request import LlmRequest
from inflight.batch.plan import ScheduledBatch
from inflight.kv_cache import KvCacheManager
from inflight.kv_cache.tiers import KvTiers, TierReporter

CLOSE_TIMEOUT = 3.0
"""Seconds for what is still to be written when the engine ends; the server has 5 for its end."""
LEAST_MEASURED_TOKENS = 128
"""Context tokens of an iteration that tells how fast contexts are; with 32 SmolLM2-135M seemed to
be a third as fast as with 512."""
LONGEST_PAUSE = 0.005
"""Seconds that an engine with nothing else to do waits for a disk before it looks again for new
requests and cancellations."""


class Onboarder:
    """Called by the loop on its thread, between two forwards, and by the simulator's."""

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
        self._moved_before = 0.0
        """The tiers' ``moving_seconds`` when the last plan was begun."""
        self._least_measured = min(LEAST_MEASURED_TOKENS, config.max_num_tokens // 2)

    def ready_to_start(
        self, waiting: Collection[LlmRequest], num_started: int
    ) -> Collection[LlmRequest]:
        """Those of ``waiting`` that the scheduler may start, in rank order as they come: all but
        those that wait for a disk. What host memory holds of the first ones is in the cache when
        this returns. ``num_started``: requests that hold blocks.

        Only for requests that could start now is anything brought back: as many as there are slots
        and free blocks for.
        """
        if self._reporter is not None:
            self._reporter.catch_up()
        self._moved_before = self.tiers.moving_seconds
        num_slots = self._max_batch_size - num_started
        room = self._kv.num_free_blocks
        num_ready = 0
        held_back: set[int] = set()
        for llm in waiting:
            room -= -(-llm.num_tokens // self._kv.tokens_per_block)
            if room < 0 or num_ready >= num_slots:
                break
            paused = llm.num_pauses > 0
            if not self.tiers.prepare(self._kv, llm.request_id, llm.token_ids, paused=paused):
                held_back.add(llm.request_id)
            else:
                num_ready += 1
        # Also those that were not asked: while others take the slots, a load goes on.
        self.tiers.forget_all_but(llm.request_id for llm in waiting)
        if not held_back:
            return waiting
        return [llm for llm in waiting if llm.request_id not in held_back]

    def observe(self, plan: ScheduledBatch, seconds: float) -> None:
        """``plan``: of the last ``ready_to_start``. ``seconds``: from that to its tokens.

        Learns what computing context tokens takes from iterations that did little else, and enough
        of it: the weights are read once however few tokens there are, and onboarding does not save
        that. The blocks that were moved for it are no part of computing: the slower a tier is, the
        slower computing would seem, and the more would be brought back.
        """
        num_rows = plan.num_context_tokens + len(plan.generation)
        if plan.num_context_tokens >= max(self._least_measured, num_rows // 2):
            moving = self.tiers.moving_seconds - self._moved_before
            self.tiers.cost.context.observe(num_rows, seconds - moving)

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
