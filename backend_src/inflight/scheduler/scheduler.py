"""The two stages in one: Scheduler turns what there is into one frozen ScheduledBatch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inflight.api import CapacitySchedulerPolicy, SchedulerConfig
from inflight.api.stats import BindingLimit
from inflight.batch import LlmRequest, ScheduledBatch, ScheduledChunk
from inflight.scheduler.capacity import (
    CapacityPlan,
    CapacityPolicy,
    GuaranteedNoEvict,
    MaxUtilization,
    StaticBatch,
)
from inflight.scheduler.latency_target import LatencyTarget
from inflight.scheduler.microbatch import MicroBatchScheduler
from inflight.scheduler.ports import KvCapacity


class Scheduler:
    """Decides what an iteration does.

    ``max_batch_size``: requests that may be started at once. ``max_num_tokens``: tokens computed in
    an iteration. With ``enable_chunked_context`` it must be at least max_batch_size +
    tokens_per_block (ExecutorConfig checks that); without, no context may be longer than it, and
    under MAX_UTILIZATION, where generated tokens are replayed as context after a pause, no request
    may grow longer than it. Then every request that fits the pool alone finishes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        enable_chunked_context: bool,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._is_static = config.capacity_scheduler_policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._capacity = _capacity_policy(
            config.capacity_scheduler_policy, max_batch_size, max_num_tokens
        )
        target = config.target_inter_token_ms
        self._target = LatencyTarget(target) if target else None
        self._micro_batch = MicroBatchScheduler(
            max_batch_size,
            max_num_tokens,
            config.context_chunking_policy if enable_chunked_context else None,
            self._target,
        )

    def observe(self, plan: ScheduledBatch, seconds: float) -> None:
        """What an iteration took, from plan to tokens: the latency target learns from it."""
        if self._target is not None:
            self._target.observe(plan, seconds)

    def schedule(
        self,
        iteration: int,
        started: Sequence[LlmRequest],
        waiting: Collection[LlmRequest],
        kv: KvCapacity,
    ) -> ScheduledBatch:
        """The plan for one iteration; changes no request and nothing in ``kv``.

        ``started``: all requests that hold blocks, in rank order (``rank_key``). ``waiting``: all
        queued ones in rank order; it is read only as far as there may be room, and each is matched
        against the cache at most once. A queued request starts if the plan has a chunk of it, and
        otherwise stays queued; a started one without a chunk stays started, unless it is paused.
        """
        plan = self._capacity.schedule(started, waiting, kv)
        context, generation = self._micro_batch.schedule(plan, kv.tokens_per_block)
        limit = self._binding_limit(plan, context, len(generation), len(waiting))
        return ScheduledBatch(iteration, context, generation, tuple(plan.paused), limit)

    def _binding_limit(
        self,
        plan: CapacityPlan,
        context: Sequence[ScheduledChunk],
        num_generations: int,
        num_waiting: int,
    ) -> BindingLimit:
        """What kept this iteration from doing more; of several, the one that was met first."""
        if plan.paused:
            return BindingLimit.BLOCKS
        num_able = len(plan.started) + len(plan.admitted)
        if len(context) + num_generations < num_able or (context and not context[0].samples):
            return BindingLimit.TOKENS
        num_fitting = len(plan.admitted) + len(plan.deferred)
        if num_waiting == num_fitting:
            return BindingLimit.QUEUE
        is_full = len(plan.started) + num_fitting >= self._max_batch_size
        return BindingLimit.ROWS if is_full or self._is_static else BindingLimit.BLOCKS


def _capacity_policy(
    policy: CapacitySchedulerPolicy, max_batch_size: int, max_num_tokens: int
) -> CapacityPolicy:
    match policy:
        case CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            return GuaranteedNoEvict(max_batch_size, max_num_tokens)
        case CapacitySchedulerPolicy.STATIC_BATCH:
            return StaticBatch(max_batch_size, max_num_tokens)
        case CapacitySchedulerPolicy.MAX_UTILIZATION:
            return MaxUtilization(max_batch_size, max_num_tokens)
