"""Every metric family that Inflight exports, in one table (docs/metrics.md shows the same)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family; each series carries the labels ``model`` and ``version`` too."""

    name: str
    kind: MetricKind
    description: str
    label: str = ""
    """The family's own label; "" when it has one series without such a label."""
    label_values: tuple[str, ...] = ("",)
    """The series of the family, fixed: every one exists from the start, at 0."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without +Inf."""


_LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)


def _gauges(name: str, description: str, label: str, *values: str) -> Family:
    return Family(
        name=name,
        kind=MetricKind.GAUGE,
        description=description,
        label=label,
        label_values=values,
    )


def _counter(name: str, description: str, label: str = "", *values: str) -> Family:
    return Family(
        name=name,
        kind=MetricKind.COUNTER,
        description=description,
        label=label,
        label_values=values or ("",),
    )


def _seconds(name: str, description: str, *buckets: float) -> Family:
    return Family(
        name=name, kind=MetricKind.HISTOGRAM, description=description, buckets=tuple(buckets)
    )


def _lengths(name: str, description: str, value: str) -> Family:
    return Family(
        name=name,
        kind=MetricKind.HISTOGRAM,
        description=description,
        label="response_metric_type",
        label_values=(value,),
        buckets=_LENGTH_BUCKETS,
    )


# TensorRT-LLM's families, named and labelled as dashboards and routers read them.
REQUESTS = _gauges(
    "nv_trt_llm_request_metrics",
    "Requests in the last iteration",
    "request_type",
    *("active", "max", "scheduled", "context", "waiting"),
)
RUNTIME_MEMORY = _gauges(
    "nv_trt_llm_runtime_memory_metrics",
    "Memory used by the engine, in bytes",
    "memory_type",
    *("cpu", "gpu", "pinned"),
)
KV_CACHE_BLOCKS = _gauges(
    "nv_trt_llm_kv_cache_block_metrics",
    "KV cache blocks: in the pool, free, used; tokens in a block; reused so far; used / max",
    "kv_cache_block_type",
    *("max", "free", "used", "tokens_per", "reused", "fraction"),
)
INFLIGHT_BATCHER = _gauges(
    "nv_trt_llm_inflight_batcher_metrics",
    "What the last iteration computed",
    "inflight_batcher_specific_metric",
    *("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
)
GENERAL = _gauges(
    "nv_trt_llm_general_metrics",
    "When the last iteration ended (seconds since the epoch), and its number",
    "general_type",
    *("timestamp", "iteration_counter"),
)
INPUT_LENGTH = _lengths(
    "nv_llm_input_token_len", "Prompt tokens of each ended request", "total_input_tokens"
)
OUTPUT_LENGTH = _lengths(
    "nv_llm_output_token_len", "Generated tokens of each ended request", "total_output_tokens"
)

# Ours.
TIME_TO_FIRST_TOKEN = _seconds(
    "inflight_time_to_first_token_seconds",
    "From the arrival at the engine model to the first token",
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
INTER_TOKEN_LATENCY = _seconds(
    "inflight_inter_token_latency_seconds",
    "Time between two iterations that generate, observed once for each iteration",
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
END_TO_END = _seconds(
    "inflight_end_to_end_seconds",
    "From the arrival at the engine model to the final response",
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
QUEUE_TIME = _seconds(
    "inflight_queue_time_seconds",
    "From entering the engine's queue to the first scheduled iteration",
    *(0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0),
)
INPUT_TOKENS = _counter("inflight_input_tokens_total", "Prompt tokens of accepted requests")
OUTPUT_TOKENS = _counter("inflight_output_tokens_total", "Generated tokens handed to clients")
PAUSES = _counter("inflight_pauses_total", "Times a started request lost its KV blocks")
EVICTED_BLOCKS = _counter("inflight_evicted_blocks_total", "Cached KV blocks that were overwritten")
REUSED_BLOCKS = _counter("inflight_reused_blocks_total", "KV blocks found in the cache")
MISSED_BLOCKS = _counter("inflight_missed_blocks_total", "KV blocks looked for and not found")
KV_TIER_BYTES = _gauges(
    "inflight_kv_tier_bytes",
    "Bytes of evicted KV blocks that each tier holds",
    "tier",
    *("host", "disk"),
)
OFFLOADED_BYTES = _counter(
    "inflight_offloaded_bytes_total", "Bytes of evicted KV blocks that were kept in a tier"
)
ONBOARDED_BYTES = _counter(
    "inflight_onboarded_bytes_total", "Bytes of KV blocks that were brought back from a tier"
)
LOST_TIER_BLOCKS = _counter(
    "inflight_lost_tier_blocks_total",
    "KV blocks that a tier lost: the disk did not keep up, an I/O error, a corrupt or foreign file",
    "reason",
    *("dropped", "io_error", "bad_file"),
)
ENDED_REQUESTS = _counter(
    "inflight_requests_total",
    "Requests that have ended, each prompt of a batch for itself, by finish reason",
    "finish_reason",
    *("stop", "length", "timed_out", "cancelled", "error"),
)
REJECTED_REQUESTS = _counter(
    "inflight_rejected_requests_total",
    "Requests that were refused, by reason",
    "reason",
    *("invalid", "unsupported", "duplicate", "queue_full", "shutting_down", "error"),
)

FAMILIES: tuple[Family, ...] = (
    REQUESTS,
    RUNTIME_MEMORY,
    KV_CACHE_BLOCKS,
    INFLIGHT_BATCHER,
    GENERAL,
    INPUT_LENGTH,
    OUTPUT_LENGTH,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    END_TO_END,
    QUEUE_TIME,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    PAUSES,
    EVICTED_BLOCKS,
    REUSED_BLOCKS,
    MISSED_BLOCKS,
    KV_TIER_BYTES,
    OFFLOADED_BYTES,
    ONBOARDED_BYTES,
    LOST_TIER_BLOCKS,
    ENDED_REQUESTS,
    REJECTED_REQUESTS,
)


def markdown_table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| family | kind | label: values | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        label = f"`{family.label}`: {', '.join(family.label_values)}" if family.label else ""
        lines.append(f"| `{family.name}` | {family.kind.value} | {label} | {family.description} |")
    return "\n".join(lines) + "\n"
