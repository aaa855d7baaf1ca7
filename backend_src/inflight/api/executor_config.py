"""The engine's frozen configuration: what Executor takes. Names follow TensorRT-LLM's Executor API.

The flat, user-facing keys (YAML, environment, Triton parameters, CLI options) are in ``config.py``;
they are resolved into these objects once, at the door.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from inflight.api.kv_events import KvEventsConfig
from inflight.errors import ConfigError


class CapacitySchedulerPolicy(Enum):
    """Which requests may hold KV blocks."""

    MAX_UTILIZATION = "max_utilization"
    """Take blocks step by step; pause the lowest-ranked started request when they run out."""
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    """Admit only what can run to completion; nothing is ever paused."""
    STATIC_BATCH = "static_batch"
    """As GUARANTEED_NO_EVICT, but admit only when no request is running: the baseline."""


class ContextChunkingPolicy(Enum):
    """How the tokens of an iteration are shared among contexts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    priority_aging_seconds: float = 60.0
    """Priority 1 counts like this many seconds of earlier arrival over priority 0; > 0."""
    target_inter_token_ms: float = 0.0
    """Contexts are cut so that streams get a token within it 19 times out of 20; 0 = off."""

    def __post_init__(self) -> None:
        if not 0 <= self.target_inter_token_ms < float("inf"):
            raise ConfigError(
                f"target_inter_token_ms: {self.target_inter_token_ms} must be 0 or larger"
            )
        if not self.priority_aging_seconds > 0:
            raise ConfigError(
                f"priority_aging_seconds: {self.priority_aging_seconds} must be larger than 0"
            )


class KvCachePausePolicy(Enum):
    """How a paused request gets the KV back that was evicted while it waited."""

    RECOMPUTE = "recompute"
    """It computes its tokens again."""
    OFFLOAD = "offload"
    """Its blocks come from the tiers, wherever they are there."""
    AUTO = "auto"
    """Whichever is faster by what was measured, as for every other request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTiersConfig:
    """Where evicted KV blocks go."""

    host_memory_bytes: int = 0
    """Host memory beside the primary pool; 0 = no such tier."""
    disk_bytes: int = 0
    """0 = no such tier."""
    disk_path: str = ""
    """Folder in which the blocks get one of their own; needed where disk_bytes > 0."""
    disk_persist: bool = False
    """Blocks on disk outlive the process; otherwise its end deletes them."""
    pause_policy: KvCachePausePolicy = KvCachePausePolicy.AUTO
    onboard_blocks: bool = True
    """False: blocks are offloaded and never brought back."""

    @property
    def exist(self) -> bool:
        return self.host_memory_bytes > 0 or self.disk_bytes > 0

    def __post_init__(self) -> None:
        for key in ("host_memory_bytes", "disk_bytes"):
            if getattr(self, key) < 0:
                raise ConfigError(f"kv_cache_{key}: {getattr(self, key)} must be 0 or larger")
        if self.disk_bytes and not self.disk_path:
            raise ConfigError("kv_cache_disk_path: must be set where kv_cache_disk_bytes is")
        if self.disk_persist and not self.disk_bytes:
            raise ConfigError("kv_cache_disk_persist: needs kv_cache_disk_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    tokens_per_block: int = 32
    enable_block_reuse: bool = True
    """False: no request ever shares or keeps a block."""
    enable_partial_reuse: bool = True
    """Reuse also the tokens that begin a block, where the whole block does not match."""
    copy_on_partial_reuse: bool = True
    """True: of a block reused in part a request gets a copy, whoever else uses the block. False:
    only blocks that nobody uses are reused in part; the request takes the block over."""
    num_blocks: int | None = None
    """Exact size of the pool; None = from max_tokens and free_memory_fraction."""
    max_tokens: int | None = None
    """Upper bound of the pool in tokens; None = from free_memory_fraction alone."""
    free_memory_fraction: float | None = None
    """Share of the memory that is free after the weights; None = 0.9 on a GPU, 0.3 on a CPU."""
    tiers: KvTiersConfig = field(default_factory=KvTiersConfig)

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1:
            raise ConfigError(f"tokens_per_block: {self.tokens_per_block} must be 1 or larger")
        for key in ("num_blocks", "max_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}: {value} must be 1 or larger")
        fraction = self.free_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(
                f"kv_cache_free_gpu_mem_fraction: {fraction} must be above 0 and at most 1"
            )
        if self.tiers.exist and not self.enable_block_reuse:
            raise ConfigError(
                "kv_cache_host_memory_bytes, kv_cache_disk_bytes: need enable_kv_cache_reuse, as "
                "blocks come back only to be reused"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Limits and policies of one executor; a request beyond a limit is refused by its name."""

    max_batch_size: int = 64
    """Requests that may be started (hold KV blocks) at once, and rows that sample an iteration."""
    max_num_tokens: int = 512
    """Tokens computed in one iteration, contexts and generations together."""
    max_seq_len: int = 8192
    """Prompt + generated tokens of one request."""
    max_beam_width: int = 1
    max_queue_size: int = 0
    """Requests that may wait; 0 = no limit."""
    enable_chunked_context: bool = True
    normalize_log_probs: bool = False
    """True: log-probs are renormalised over the candidates that survive top_k/top_p/min_p."""
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    kv_events_config: KvEventsConfig | None = None
    """None: the events of the KV cache are not published."""
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0

    def __post_init__(self) -> None:
        for key in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} must be 1 or larger")
        for key in ("max_queue_size", "iter_stats_max_iterations", "request_stats_max_iterations"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key}: {getattr(self, key)} must be 0 or larger")
        if self.max_beam_width != 1:
            raise ConfigError(f"max_beam_width: {self.max_beam_width}: only 1 is served")
        if self.scheduler_config.target_inter_token_ms and not self.enable_chunked_context:
            raise ConfigError("target_inter_token_ms: needs enable_chunked_context")
        if self.kv_events_config is not None and not self.kv_cache_config.enable_block_reuse:
            raise ConfigError("enable_kv_cache_events: needs enable_kv_cache_reuse")
        least = self.max_batch_size + self.kv_cache_config.tokens_per_block
        if self.enable_chunked_context and self.max_num_tokens < least:
            raise ConfigError(
                f"max_num_tokens: {self.max_num_tokens} must be at least max_batch_size + "
                f"tokens_per_block = {least}, else contexts could wait for ever behind generations"
            )
