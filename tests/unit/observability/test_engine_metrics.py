from __future__ import annotations

import pytest

from inflight.api.response import FinishReason, RequestPerfMetrics
from inflight.api.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    KvTiersStats,
    KvTierStats,
)
from inflight.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    ShuttingDownError,
    UnsupportedRequestError,
)
from inflight.observability.engine_metrics import EngineMetrics
from inflight.observability.ledger import Update

MS = 1_000_000


def kv(**changes: int) -> KvCacheStats:
    fields = {
        "max_num_blocks": 40,
        "free_num_blocks": 30,
        "used_num_blocks": 10,
        "tokens_per_block": 16,
    }
    return KvCacheStats(**(fields | changes))


def iteration(number: int, **changes: object) -> IterationStats:
    fields: dict[str, object] = {
        "timestamp": 1000.5 + number,
        "iter": number,
        "iter_latency_ms": 8.0,
        "num_active_requests": 5,
        "max_num_active_requests": 64,
        "cpu_mem_usage": 1 << 30,
        "kv_cache_stats": kv(),
        "inflight_batching_stats": InflightBatchingStats(
            num_scheduled_requests=3,
            num_context_requests=1,
            num_gen_requests=2,
            num_paused_requests=1,
            num_ctx_tokens=17,
        ),
    }
    return IterationStats(**(fields | changes))  # type: ignore[arg-type]


def values(updates: list[Update]) -> dict[tuple[str, str], float]:
    """The last value told for each series."""
    return {(update.series.family, update.series.label_value): update.value for update in updates}


def observed(updates: list[Update], family: str) -> list[float]:
    return [update.value for update in updates if update.series.family == family]


def test_gauges_show_the_last_iteration() -> None:
    metrics = EngineMetrics()
    metrics.iterations([iteration(1, num_active_requests=9), iteration(2)])
    told = values(metrics.drain())
    requests = "nv_trt_llm_request_metrics"
    assert {label: told[requests, label] for label in ("active", "max", "scheduled")} == {
        "active": 5,
        "max": 64,
        "scheduled": 3,
    }
    assert (told[requests, "context"], told[requests, "waiting"]) == (1, 2)
    batcher = "nv_trt_llm_inflight_batcher_metrics"
    assert told[batcher, "total_context_tokens"] == 17
    assert told[batcher, "generation_requests"] == 2
    assert told[batcher, "paused_requests"] == 1
    assert told["nv_trt_llm_runtime_memory_metrics", "cpu"] == 1 << 30
    assert told["nv_trt_llm_general_metrics", "iteration_counter"] == 2
    assert told["nv_trt_llm_general_metrics", "timestamp"] == 1002.5


def test_waiting_is_never_negative() -> None:
    metrics = EngineMetrics()
    metrics.iterations([iteration(1, num_active_requests=1)])  # 3 were scheduled, 2 have ended
    assert values(metrics.drain())["nv_trt_llm_request_metrics", "waiting"] == 0


def test_idle_clears_the_load_and_keeps_the_limits() -> None:
    metrics = EngineMetrics()
    metrics.iterations([iteration(1)])
    metrics.drain()
    metrics.idle()
    told = values(metrics.drain())
    assert told["nv_trt_llm_request_metrics", "active"] == 0
    assert told["nv_trt_llm_inflight_batcher_metrics", "generation_requests"] == 0
    assert ("nv_trt_llm_request_metrics", "max") not in told


def test_unchanged_gauges_are_not_told_again() -> None:
    metrics = EngineMetrics()
    metrics.kv_cache(kv())
    assert metrics.drain()
    metrics.kv_cache(kv())
    assert metrics.drain() == []


def test_every_generating_iteration_is_one_inter_token_observation() -> None:
    metrics = EngineMetrics()
    gaps = (0.02, 0.0, 0.03)
    metrics.iterations([iteration(i, token_gap_seconds=gap) for i, gap in enumerate(gaps)])
    family = "inflight_inter_token_latency_seconds"
    assert observed(metrics.drain(), family) == [0.02, 0.03]


def test_pauses_of_all_iterations_add_up() -> None:
    metrics = EngineMetrics()
    metrics.iterations([iteration(1), iteration(2)])
    assert values(metrics.drain())["inflight_pauses_total", ""] == 2
    metrics.iterations([])
    assert metrics.drain() == []


def test_block_gauges_and_counters_follow_the_cache() -> None:
    metrics = EngineMetrics()
    metrics.kv_cache(kv(reused_blocks=4, missed_blocks=6, evicted_blocks=1))
    told = values(metrics.drain())
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert [told[blocks, label] for label in ("max", "free", "used", "tokens_per", "reused")] == [
        40,
        30,
        10,
        16,
        4,
    ]
    assert told[blocks, "fraction"] == 0.25
    metrics.kv_cache(kv(reused_blocks=9, missed_blocks=6, evicted_blocks=3))
    told = values(metrics.drain())
    assert told["inflight_reused_blocks_total", ""] == 5
    assert told["inflight_evicted_blocks_total", ""] == 2
    assert ("inflight_missed_blocks_total", "") not in told


def test_a_total_that_falls_adds_nothing() -> None:
    metrics = EngineMetrics()
    metrics.kv_cache(kv(reused_blocks=9))
    metrics.drain()
    metrics.kv_cache(kv(reused_blocks=2))
    assert ("inflight_reused_blocks_total", "") not in values(metrics.drain())


def test_an_ended_request_is_counted_and_timed_from_its_arrival_at_the_model() -> None:
    metrics = EngineMetrics()
    perf = RequestPerfMetrics(
        arrival_time_ns=20 * MS,
        first_scheduled_time_ns=50 * MS,
        first_token_time_ns=110 * MS,
        last_token_time_ns=200 * MS,
    )
    metrics.request_ended(
        FinishReason.STOP_WORDS,
        num_input_tokens=7,
        num_output_tokens=12,
        perf=perf,
        received_ns=10 * MS,
        answered_ns=210 * MS,
    )
    told = values(metrics.drain())
    assert told["inflight_requests_total", "stop"] == 1
    assert told["nv_llm_input_token_len", "total_input_tokens"] == 7
    assert told["nv_llm_output_token_len", "total_output_tokens"] == 12
    assert told["inflight_queue_time_seconds", ""] == pytest.approx(0.03)
    assert told["inflight_time_to_first_token_seconds", ""] == pytest.approx(0.1)
    assert told["inflight_end_to_end_seconds", ""] == pytest.approx(0.2)


def test_a_request_that_never_ran_has_no_times_of_running() -> None:
    metrics = EngineMetrics()
    metrics.request_ended(
        FinishReason.TIMED_OUT,
        num_input_tokens=7,
        num_output_tokens=0,
        perf=RequestPerfMetrics(arrival_time_ns=20 * MS),
        received_ns=10 * MS,
        answered_ns=30 * MS,
    )
    families = {update.series.family for update in metrics.drain()}
    assert "inflight_end_to_end_seconds" in families
    assert not families & {"inflight_queue_time_seconds", "inflight_time_to_first_token_seconds"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequestError("top_p", 2, "must be between 0 and 1"), "invalid"),
        (UnsupportedRequestError("lora_task_id", "LoRA is not served"), "unsupported"),
        (DuplicateRequestError("id"), "duplicate"),
        (QueueFullError("full"), "queue_full"),
        (ShuttingDownError("down"), "shutting_down"),
        (RequestFailedError("broken"), "error"),
    ],
)
def test_rejections_are_counted_by_reason(error: RequestError, reason: str) -> None:
    metrics = EngineMetrics()
    metrics.request_rejected(error)
    metrics.request_rejected(error)
    assert values(metrics.drain()) == {("inflight_rejected_requests_total", reason): 2}


def test_tiers_show_what_they_hold_moved_and_lost() -> None:
    metrics = EngineMetrics()
    tiers = KvTiersStats(
        host=KvTierStats(3, 300, 1000),
        disk=None,
        offloaded_blocks=7,
        offloaded_bytes=700,
        dropped_blocks=2,
        onboarded_host_blocks=4,
        onboarded_disk_blocks=1,
        onboarded_bytes=500,
        recompute_decisions=0,
        late_loads=0,
        disk_io_errors=6,
        disk_bad_files=5,
        host_bytes_per_second=None,
        disk_bytes_per_second=None,
        context_tokens_per_second=None,
    )
    metrics.iterations([iteration(1, kv_tiers_stats=tiers)])
    told = values(metrics.drain())
    assert told["inflight_kv_tier_bytes", "host"] == 300
    assert told["inflight_kv_tier_bytes", "disk"] == 0
    assert told["inflight_offloaded_bytes_total", ""] == 700
    assert told["inflight_onboarded_bytes_total", ""] == 500
    lost = "inflight_lost_tier_blocks_total"
    assert [told[lost, name] for name in ("dropped", "io_error", "bad_file")] == [2, 6, 5]
    assert tiers.onboarded_blocks == 5
    metrics.iterations([iteration(2, kv_tiers_stats=tiers)])
    assert (lost, "dropped") not in values(metrics.drain()), "nothing more was lost"


def test_tokens_and_early_ends_are_counted() -> None:
    metrics = EngineMetrics()
    metrics.request_accepted(11)
    metrics.tokens_sent(2)
    metrics.tokens_sent(0)
    metrics.tokens_sent(3)
    metrics.requests_cancelled(2)
    metrics.request_failed()
    assert values(metrics.drain()) == {
        ("inflight_input_tokens_total", ""): 11,
        ("inflight_output_tokens_total", ""): 5,
        ("inflight_requests_total", "cancelled"): 2,
        ("inflight_requests_total", "error"): 1,
    }
    assert metrics.drain() == []


def test_a_counter_cannot_be_asked_to_fall() -> None:
    with pytest.raises(AssertionError):
        EngineMetrics().tokens_sent(-1)
