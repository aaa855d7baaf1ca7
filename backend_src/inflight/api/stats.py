"""Statistics of iterations and requests; their JSON has the names of TensorRT-LLM's Executor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_RENAMED = {"iter_latency_ms": "iterLatencyMS", "timestamp": "timestamp"}


def _camel(name: str) -> str:
    if name in _RENAMED:
        return _RENAMED[name]
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class _Json:
    """Mixin: ``to_json()`` gives a dict with camelCase keys, nested statistics included."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if isinstance(value, tuple):
                value = [part.to_json() if isinstance(part, _Json) else part for part in value]
            out[_camel(item.name)] = value.to_json() if isinstance(value, _Json) else value
        return out


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

    @property
    def cache_hit_rate(self) -> float:
        """Reused / (reused + missed); 0.0 before anything was looked up."""
        looked_up = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / looked_up if looked_up else 0.0

    def to_json(self) -> dict[str, Any]:
        return _Json.to_json(self) | {"cacheHitRate": self.cache_hit_rate}


@dataclass(frozen=True, slots=True)
class KvTierStats(_Json):
    """What one tier holds now."""

    num_blocks: int
    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTiersStats(_Json):
    """The tiers below the primary pool. Counts are since the start; rates are averages of the
    latest measurements, None before the first."""

    host: KvTierStats | None
    disk: KvTierStats | None
    offloaded_blocks: int
    """Evicted blocks that were copied into the first tier."""
    offloaded_bytes: int
    dropped_blocks: int
    """Lost because the disk did not write fast enough."""
    onboarded_host_blocks: int
    onboarded_disk_blocks: int
    onboarded_bytes: int
    recompute_decisions: int
    """Times that blocks were there, and computing them was measured to be faster or is what
    kv_cache_pause_policy says."""
    late_loads: int
    """Requests that waited for the disk as long as computing takes, and then were computed."""
    disk_io_errors: int
    disk_bad_files: int
    """Corrupt, cut or foreign files."""
    host_bytes_per_second: float | None
    disk_bytes_per_second: float | None
    context_tokens_per_second: float | None

    @property
    def onboarded_blocks(self) -> int:
        return self.onboarded_host_blocks + self.onboarded_disk_blocks


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
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    """Requests in the engine: started and queued."""
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    max_batch_size_static: int = 0
    max_num_tokens_static: int = 0
    cpu_mem_usage: int = 0
    """Resident bytes of the process."""
    gpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    num_generated_tokens: int = 0
    """Tokens sampled in this iteration."""
    kv_cache_stats: KvCacheStats
    kv_tiers_stats: KvTiersStats | None = None
    """None: there are no tiers."""
    inflight_batching_stats: InflightBatchingStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats(_Json):
    """One request as it stood after an iteration."""

    id: int
    stage: str
    """QUEUED, CONTEXT_IN_PROGRESS, GENERATION_IN_PROGRESS or GENERATION_COMPLETE."""
    context_prefill_position: int
    num_generated_tokens: int
    scheduled: bool
    paused: bool
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatsPerIteration(_Json):
    iter: int
    request_stats: tuple[RequestStats, ...]
