"""Statistics of iterations and requests; their JSON has the names of TensorRT-LLM's Executor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

_RENAMED = {
    "iter_latency_ms": "iterLatencyMS",
    "new_active_requests_queue_latency_ms": "newActiveRequestsQueueLatencyMS",
}


def _camel(name: str) -> str:
    if name in _RENAMED:
        return _RENAMED[name]
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _hit_rate(reused: int, missed: int) -> float:
    return reused / (reused + missed) if reused + missed else 0.0


class _Json:
    """Mixin: ``to_json()`` gives a dict with camelCase keys, nested statistics included."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if isinstance(value, tuple):
                value = [part.to_json() if isinstance(part, _Json) else part for part in value]
            elif isinstance(value, Enum):
                value = value.value
            out[_camel(item.name)] = value.to_json() if isinstance(value, _Json) else value
        return out


TIERS = ("host", "disk")
"""Below the primary pool, the nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTierStats(_Json):
    """One tier below the primary pool: its bytes now, and what moved since the start."""

    tier: str
    """One of TIERS."""
    max_bytes: int
    used_bytes: int = 0
    num_blocks: int = 0
    offloaded_bytes: int = 0
    """KV of evicted blocks that was written into it, from the primary pool or the tier above."""
    onboarded_bytes: int = 0
    """KV brought back from it into the primary pool."""
    dropped_blocks: int = 0
    """Lost on the way to it, because it did not write fast enough."""
    io_errors: int = 0
    bad_files: int = 0
    """Corrupt, cut or foreign files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOnboardingStats(_Json):
    """What is decided about blocks in the tiers, and the measured rates that decide: averages of
    the latest measurements, None before the first. Counts are since the start."""

    recompute_decisions: int = 0
    """Times that blocks were there, and computing them was measured to be faster or is what
    kv_cache_pause_policy says."""
    late_loads: int = 0
    """Requests that waited for the disk as long as computing takes, and then were computed."""
    host_bytes_per_second: float | None = None
    """From host memory into the primary pool."""
    disk_bytes_per_second: float | None = None
    """From the disk into host memory."""
    context_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheStats(_Json):
    """Blocks of the pool now (max, free, used), and counts since the start (the others)."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    evicted_blocks: int = 0
    tiers: tuple[KvTierStats, ...] = ()
    """Where evicted blocks go; empty: nowhere, they are lost."""
    onboarding: KvOnboardingStats | None = None
    """None: there are no tiers."""

    @property
    def cache_hit_rate(self) -> float:
        """Reused / (reused + missed); 0.0 before anything was looked up."""
        return _hit_rate(self.reused_blocks, self.missed_blocks)

    def to_json(self) -> dict[str, Any]:
        return _Json.to_json(self) | {"cacheHitRate": self.cache_hit_rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventStats(_Json):
    """What was published of the KV cache's events, since the start."""

    num_messages: int = 0
    num_published_events: int = 0
    num_dropped_events: int = 0
    """Changes for which the queue had no room: told later, as a difference of the whole state."""
    num_replays: int = 0
    num_refused_replays: int = 0
    """Malformed requests on the replay endpoint."""


class BindingLimit(Enum):
    """What kept an iteration from computing more."""

    ROWS = "rows"
    """``max_batch_size`` requests were started (or a static batch was draining), others waited."""
    TOKENS = "tokens"
    """A request that may run got no tokens, or not all it wanted: ``max_num_tokens``, or the
    latency target."""
    BLOCKS = "blocks"
    """Requests were paused, or waited, for KV blocks."""
    QUEUE = "queue"
    """Nothing: every request in the engine got what it wanted, or waits for its KV from a disk.
    More load would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightBatchingStats(_Json):
    """What one iteration computed."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    row_fill: float = 0.0
    """Scheduled requests / ``max_batch_size``, 0..1."""
    token_fill: float = 0.0
    """Computed tokens / ``max_num_tokens``, 0..1."""
    binding_limit: BindingLimit = BindingLimit.QUEUE


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBatchingStats(_Json):
    """What one iteration of a static batch computed."""

    num_scheduled_requests: int
    num_context_requests: int
    num_ctx_tokens: int
    num_gen_tokens: int
    """One for each request that generates."""
    empty_gen_slots: int
    """``max_batch_size`` less the requests that were computed: nobody joins in their place before
    the batch has drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStats(_Json):
    """One iteration; times are milliseconds unless the name says otherwise."""

    timestamp: float
    """Seconds since the epoch, when the iteration ended."""
    iter: int
    iter_latency_ms: float
    token_gap_seconds: float = 0.0
    """Time since the iteration before, if both generated: the inter-token latency of the streams
    that were running in both; 0.0 otherwise."""
    new_active_requests_queue_latency_ms: float = 0.0
    """Time in the queue, summed over the requests that started for the first time since the last
    recorded iteration."""
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    """Requests in the engine: started and queued."""
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    max_batch_size_static: int = 0
    max_batch_size_tuner_recommended: int = 0
    """Always 0, as in TensorRT-LLM without a tuner."""
    max_batch_size_runtime: int = 0
    max_num_tokens_static: int = 0
    max_num_tokens_tuner_recommended: int = 0
    max_num_tokens_runtime: int = 0
    cpu_mem_usage: int = 0
    """Resident bytes of the process."""
    gpu_mem_usage: int = 0
    """Bytes of the device that tensors take; 0 where the model computes on the CPU."""
    pinned_mem_usage: int = 0
    """Bytes of the host that are pinned for offloaded KV blocks."""
    num_generated_tokens: int = 0
    """Tokens sampled in this iteration."""
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    static_batching_stats: StaticBatchingStats | None = None
    """None but under STATIC_BATCH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats(_Json):
    """One request as it stood after an iteration."""

    id: int
    stage: str
    """QUEUED, CONTEXT_IN_PROGRESS, GENERATION_IN_PROGRESS or GENERATION_COMPLETE."""
    context_prefill_position: int
    num_generated_tokens: int
    avg_num_decoded_tokens_per_iter: float = 0.0
    """1.0 once it generates: no more than one token an iteration."""
    scheduled: bool
    paused: bool
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0

    @property
    def kv_cache_hit_rate_per_request(self) -> float:
        """Reused / (reused + missed); 0.0 before anything was looked up."""
        return _hit_rate(self.reused_blocks_per_request, self.missed_blocks_per_request)

    def to_json(self) -> dict[str, Any]:
        rate = self.kv_cache_hit_rate_per_request
        return _Json.to_json(self) | {"kvCacheHitRatePerRequest": rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatsPerIteration(_Json):
    iter: int
    request_stats: tuple[RequestStats, ...]
