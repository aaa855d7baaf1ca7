"""StatsRecorder: IterationStats and RequestStats of each iteration, in bounded rings."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from inflight.api.executor_config import CapacitySchedulerPolicy, ExecutorConfig
from inflight.api.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    StaticBatchingStats,
)
from inflight.batch.llm_request import LlmRequest
from inflight.batch.plan import ScheduledBatch
from inflight.engine.book import RequestBook
from inflight.engine.iteration import SettledIteration
from inflight.engine.memory import resident_bytes
from inflight.kv_cache.pools import KvCache
from inflight.model.runner import MemoryUsage

_MEMORY_PERIOD_SECONDS = 1.0


class StatsRecorder:
    """The engine thread records; any thread drains."""

    def __init__(self, config: ExecutorConfig, memory_usage: Callable[[], MemoryUsage]) -> None:
        """``memory_usage``: of the runner; asked on the engine thread."""
        self._config = config
        self._memory_usage = memory_usage
        self._iterations: deque[IterationStats] = deque(maxlen=config.iter_stats_max_iterations)
        self._requests: deque[RequestStatsPerIteration] = deque(
            maxlen=config.request_stats_max_iterations
        )
        self._lock = threading.Lock()
        self._num_new = 0
        self._queue_seconds = 0.0
        self._num_completed = 0
        self._paused: list[LlmRequest] = []
        """In plans that have no record of their own, since the last record."""
        self._last_generation_end: float | None = None
        self._memory_taken = float("-inf")
        self._memory = (0, MemoryUsage())
        """Resident bytes of the process, and what the runner said at the same time."""

    def count_new(self, number: int) -> None:
        """Requests that joined since the last recorded iteration."""
        self._num_new += number

    def count_started(self, queue_seconds: float) -> None:
        """A request starts for the first time; ``queue_seconds``: since its arrival."""
        self._queue_seconds += queue_seconds

    def count_completed(self) -> None:
        self._num_completed += 1

    def count_pauses(self, plan: ScheduledBatch) -> None:
        """``plan`` only pauses, or failed: its pauses go into the next record."""
        self._paused += plan.paused

    def record(
        self,
        settled: SettledIteration,
        book: RequestBook,
        kv: KvCache,
        kv_cache_stats: KvCacheStats,
    ) -> None:
        """One iteration. Requests and blocks are counted as they stand now, when the next one has
        been planned."""
        plan, ended = settled.plan, settled.ended
        paused = [*self._paused, *plan.paused]
        self._paused.clear()
        resident, usage = self._memory_at(ended)
        stats = IterationStats(
            timestamp=time.time(),
            iter=plan.iteration,
            iter_latency_ms=(ended - settled.began) * 1000,
            token_gap_seconds=self._token_gap(plan, ended),
            new_active_requests_queue_latency_ms=self._queue_seconds * 1000,
            num_new_active_requests=self._num_new,
            num_active_requests=len(book),
            num_queued_requests=len(book.waiting),
            num_completed_requests=self._num_completed,
            max_num_active_requests=self._config.max_batch_size,
            max_batch_size_static=self._config.max_batch_size,
            max_batch_size_runtime=self._config.max_batch_size,
            max_num_tokens_static=self._config.max_num_tokens,
            max_num_tokens_runtime=self._config.max_num_tokens,
            cpu_mem_usage=resident,
            gpu_mem_usage=usage.device,
            pinned_mem_usage=usage.pinned,
            num_generated_tokens=settled.num_generated,
            kv_cache_stats=kv_cache_stats,
            inflight_batching_stats=_batching(plan, len(paused), self._config),
            static_batching_stats=_static_batching(plan, self._config),
        )
        self._num_new = self._num_completed = 0
        self._queue_seconds = 0.0
        with self._lock:
            self._iterations.append(stats)
            if self._config.request_stats_max_iterations:
                self._requests.append(_requests(plan, paused, book, kv))

    def take_iterations(self) -> list[IterationStats]:
        with self._lock:
            taken = list(self._iterations)
            self._iterations.clear()
        return taken

    def take_requests(self) -> list[RequestStatsPerIteration]:
        with self._lock:
            taken = list(self._requests)
            self._requests.clear()
        return taken

    def _token_gap(self, plan: ScheduledBatch, ended: float) -> float:
        before, self._last_generation_end = self._last_generation_end, None
        if any(chunk.samples for chunk in plan.chunks):
            self._last_generation_end = ended
        return ended - before if before is not None and plan.generation else 0.0

    def _memory_at(self, now: float) -> tuple[int, MemoryUsage]:
        if now - self._memory_taken >= _MEMORY_PERIOD_SECONDS:
            self._memory_taken = now
            self._memory = resident_bytes(), self._memory_usage()
        return self._memory


def _batching(
    plan: ScheduledBatch, num_paused: int, config: ExecutorConfig
) -> InflightBatchingStats:
    return InflightBatchingStats(
        num_scheduled_requests=plan.num_chunks,
        num_context_requests=len(plan.context),
        num_gen_requests=len(plan.generation),
        num_paused_requests=num_paused,
        num_ctx_tokens=plan.num_context_tokens,
        avg_num_decoded_tokens_per_iter=1.0 if plan.generation else 0.0,
        row_fill=plan.num_chunks / config.max_batch_size,
        token_fill=plan.num_tokens / config.max_num_tokens,
        binding_limit=plan.binding_limit,
    )


def _static_batching(plan: ScheduledBatch, config: ExecutorConfig) -> StaticBatchingStats | None:
    policy = config.scheduler_config.capacity_scheduler_policy
    if policy is not CapacitySchedulerPolicy.STATIC_BATCH:
        return None
    return StaticBatchingStats(
        num_scheduled_requests=plan.num_chunks,
        num_context_requests=len(plan.context),
        num_ctx_tokens=plan.num_context_tokens,
        num_gen_tokens=len(plan.generation),
        empty_gen_slots=config.max_batch_size - plan.num_chunks,
    )


def _requests(
    plan: ScheduledBatch, paused: Sequence[LlmRequest], book: RequestBook, kv: KvCache
) -> RequestStatsPerIteration:
    scheduled = {chunk.request.request_id for chunk in plan.chunks}
    paused_ids = {request.request_id for request in paused}
    stats = []
    for record in book:
        llm = record.llm
        counts = kv.request_counts(llm.request_id)
        stats.append(
            RequestStats(
                id=llm.request_id,
                stage=llm.state.name,
                context_prefill_position=min(llm.context_position, llm.context_length),
                num_generated_tokens=llm.num_generated_tokens,
                avg_num_decoded_tokens_per_iter=1.0 if llm.num_generated_tokens else 0.0,
                scheduled=llm.request_id in scheduled,
                paused=llm.request_id in paused_ids,
                alloc_total_blocks_per_request=counts.alloc_total,
                alloc_new_blocks_per_request=counts.alloc_new,
                reused_blocks_per_request=counts.reused,
                missed_blocks_per_request=counts.missed,
            )
        )
    return RequestStatsPerIteration(iter=plan.iteration, request_stats=tuple(stats))
