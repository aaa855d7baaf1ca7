"""What callers and the engine say to each other: requests, responses, configuration, statistics."""

from inflight.api.executor_config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCachePausePolicy,
    KvTiersConfig,
    SchedulerConfig,
)
from inflight.api.kv import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.api.request import OutputConfig, Request, SamplingConfig
from inflight.api.response import FinishReason, RequestPerfMetrics, Response, Result

__all__ = [
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "ExecutorConfig",
    "FinishReason",
    "KvCacheConfig",
    "KvCachePausePolicy",
    "KvCacheRetentionConfig",
    "KvTiersConfig",
    "OutputConfig",
    "Request",
    "RequestPerfMetrics",
    "Response",
    "Result",
    "SamplingConfig",
    "SchedulerConfig",
    "TokenRangeRetentionConfig",
]
