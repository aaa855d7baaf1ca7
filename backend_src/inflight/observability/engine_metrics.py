"""EngineMetrics: from the engine's statistics and ended requests to the ledger of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.api.response import FinishReason, RequestPerfMetrics
from inflight.api.stats import InflightBatchingStats, IterationStats, KvCacheStats, KvTiersStats
from inflight.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    UnsupportedRequestError,
)
from inflight.observability import families
from inflight.observability.ledger import MetricLedger, Update

_REJECTIONS: tuple[tuple[type[RequestError], str], ...] = (
    (InvalidRequestError, "invalid"),
    (UnsupportedRequestError, "unsupported"),
    (DuplicateRequestError, "duplicate"),
    (QueueFullError, "queue_full"),
    (ShuttingDownError, "shutting_down"),
)

_NS = 1e-9


class EngineMetrics:
    """Thread-safe. ``drain`` gives what the server has not been told yet."""

    def __init__(self) -> None:
        self._ledger = MetricLedger()

    def request_accepted(self, num_input_tokens: int) -> None:
        self._ledger.add(families.INPUT_TOKENS, num_input_tokens)

    def request_rejected(self, error: RequestError) -> None:
        """``error``: why it never reached the engine's queue."""
        reason = next((name for kind, name in _REJECTIONS if isinstance(error, kind)), "error")
        self._ledger.add(families.REJECTED_REQUESTS, 1, reason)

    def tokens_sent(self, num_output_tokens: int) -> None:
        self._ledger.add(families.OUTPUT_TOKENS, num_output_tokens)

    def request_failed(self) -> None:
        """An accepted request ended with an error."""
        self._ledger.add(families.ENDED_REQUESTS, 1, "error")

    def requests_cancelled(self, number: int) -> None:
        """So many batch elements were cancelled before they reached the engine's queue."""
        self._ledger.add(families.ENDED_REQUESTS, number, FinishReason.CANCELLED.text)

    def request_ended(
        self,
        reason: FinishReason,
        *,
        num_input_tokens: int,
        num_output_tokens: int,
        perf: RequestPerfMetrics | None,
        received_ns: int,
        answered_ns: int,
    ) -> None:
        """An accepted request ended regularly.

        ``num_output_tokens``: of the whole answer. ``received_ns``, ``answered_ns``: when it
        reached the engine model and when its final response leaves, in the clock of ``perf``.
        """
        ledger = self._ledger
        ledger.add(families.ENDED_REQUESTS, 1, reason.text)
        ledger.observe(families.INPUT_LENGTH, num_input_tokens, "total_input_tokens")
        ledger.observe(families.OUTPUT_LENGTH, num_output_tokens, "total_output_tokens")
        ledger.observe(families.END_TO_END, (answered_ns - received_ns) * _NS)
        if perf is None:
            return
        if perf.first_scheduled_time_ns:
            waited = perf.first_scheduled_time_ns - perf.arrival_time_ns
            ledger.observe(families.QUEUE_TIME, waited * _NS)
        if perf.first_token_time_ns:
            until_first = perf.first_token_time_ns - received_ns
            ledger.observe(families.TIME_TO_FIRST_TOKEN, until_first * _NS)

    def iterations(self, stats: Sequence[IterationStats]) -> None:
        """The iterations since the last call, oldest first; gauges show the last one."""
        ledger = self._ledger
        for each in stats:
            if each.token_gap_seconds > 0:
                ledger.observe(families.INTER_TOKEN_LATENCY, each.token_gap_seconds)
            ledger.add(families.PAUSES, each.inflight_batching_stats.num_paused_requests)
        if not stats:
            return
        last = stats[-1]
        self._batch(last.num_active_requests, last.inflight_batching_stats)
        ledger.set(families.REQUESTS, "max", last.max_num_active_requests)
        ledger.set(families.RUNTIME_MEMORY, "cpu", last.cpu_mem_usage)
        ledger.set(families.RUNTIME_MEMORY, "gpu", last.gpu_mem_usage)
        ledger.set(families.RUNTIME_MEMORY, "pinned", last.pinned_mem_usage)
        if last.kv_tiers_stats is not None:
            self._tiers(last.kv_tiers_stats)
        ledger.set(families.GENERAL, "timestamp", last.timestamp)
        ledger.set(families.GENERAL, "iteration_counter", last.iter)

    def idle(self) -> None:
        """Nothing is in flight. A cancelled request leaves no iteration that would say so."""
        self._batch(0, InflightBatchingStats())

    def kv_cache(self, stats: KvCacheStats) -> None:
        """How the KV cache stands now."""
        ledger = self._ledger
        fraction = stats.used_num_blocks / stats.max_num_blocks if stats.max_num_blocks else 0.0
        for label_value, value in (
            ("max", stats.max_num_blocks),
            ("free", stats.free_num_blocks),
            ("used", stats.used_num_blocks),
            ("tokens_per", stats.tokens_per_block),
            ("reused", stats.reused_blocks),
            ("fraction", fraction),
        ):
            ledger.set(families.KV_CACHE_BLOCKS, label_value, value)
        ledger.raise_to(families.EVICTED_BLOCKS, stats.evicted_blocks)
        ledger.raise_to(families.REUSED_BLOCKS, stats.reused_blocks)
        ledger.raise_to(families.MISSED_BLOCKS, stats.missed_blocks)

    def drain(self) -> list[Update]:
        return self._ledger.drain()

    def _tiers(self, stats: KvTiersStats) -> None:
        ledger = self._ledger
        for name, tier in (("host", stats.host), ("disk", stats.disk)):
            ledger.set(families.KV_TIER_BYTES, name, 0 if tier is None else tier.used_bytes)
        ledger.raise_to(families.OFFLOADED_BYTES, stats.offloaded_bytes)
        ledger.raise_to(families.ONBOARDED_BYTES, stats.onboarded_bytes)
        ledger.raise_to(families.LOST_TIER_BLOCKS, stats.dropped_blocks, "dropped")
        ledger.raise_to(families.LOST_TIER_BLOCKS, stats.disk_io_errors, "io_error")
        ledger.raise_to(families.LOST_TIER_BLOCKS, stats.disk_bad_files, "bad_file")

    def _batch(self, num_active: int, batch: InflightBatchingStats) -> None:
        ledger = self._ledger
        waiting = max(0, num_active - batch.num_scheduled_requests)
        ledger.set(families.REQUESTS, "active", num_active)
        ledger.set(families.REQUESTS, "scheduled", batch.num_scheduled_requests)
        ledger.set(families.REQUESTS, "context", batch.num_context_requests)
        ledger.set(families.REQUESTS, "waiting", waiting)
        ledger.set(families.INFLIGHT_BATCHER, "total_context_tokens", batch.num_ctx_tokens)
        ledger.set(families.INFLIGHT_BATCHER, "generation_requests", batch.num_gen_requests)
        ledger.set(families.INFLIGHT_BATCHER, "micro_batch_id", batch.micro_batch_id)
        ledger.set(families.INFLIGHT_BATCHER, "paused_requests", batch.num_paused_requests)
