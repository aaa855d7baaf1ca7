"""The JSON of statistics: TensorRT-LLM's names, written out, and what we add to them."""

from __future__ import annotations

import json

import pytest

from inflight.api.stats import (
    TIERS,
    BindingLimit,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    KvOnboardingStats,
    KvTierStats,
    RequestStats,
    RequestStatsPerIteration,
)


def _names(text: str) -> set[str]:
    return set(text.split())


ITERATION_NAMES = _names(
    """timestamp iter iterLatencyMS newActiveRequestsQueueLatencyMS numNewActiveRequests
    numActiveRequests numQueuedRequests numCompletedRequests maxNumActiveRequests
    maxBatchSizeStatic maxBatchSizeTunerRecommended maxBatchSizeRuntime maxNumTokensStatic
    maxNumTokensTunerRecommended maxNumTokensRuntime gpuMemUsage cpuMemUsage pinnedMemUsage
    kvCacheStats inflightBatchingStats staticBatchingStats"""
)
KV_NAMES = _names(
    """maxNumBlocks freeNumBlocks usedNumBlocks tokensPerBlock allocTotalBlocks allocNewBlocks
    reusedBlocks missedBlocks cacheHitRate"""
)
BATCHING_NAMES = _names(
    """numScheduledRequests numContextRequests numGenRequests numPausedRequests numCtxTokens
    microBatchId avgNumDecodedTokensPerIter"""
)
REQUEST_NAMES = _names(
    """id stage contextPrefillPosition numGeneratedTokens avgNumDecodedTokensPerIter scheduled
    paused allocTotalBlocksPerRequest allocNewBlocksPerRequest reusedBlocksPerRequest
    missedBlocksPerRequest kvCacheHitRatePerRequest"""
)


def kv_stats(**changes: int) -> KvCacheStats:
    return KvCacheStats(
        max_num_blocks=8,
        free_num_blocks=5,
        used_num_blocks=3,
        tokens_per_block=16,
        tiers=(KvTierStats(tier="host", max_bytes=1000, used_bytes=64, onboarded_bytes=32),),
        onboarding=KvOnboardingStats(late_loads=2, host_bytes_per_second=1e9),
        **changes,
    )


def iteration_stats() -> IterationStats:
    return IterationStats(
        timestamp=12.5,
        iter=3,
        iter_latency_ms=4.0,
        kv_cache_stats=kv_stats(reused_blocks=3, missed_blocks=1),
        inflight_batching_stats=InflightBatchingStats(
            row_fill=0.5, binding_limit=BindingLimit.BLOCKS
        ),
    )


def test_an_iteration_has_every_name_of_tensorrt_llm_and_few_of_ours() -> None:
    written = iteration_stats().to_json()
    assert written.keys() == ITERATION_NAMES | {"tokenGapSeconds", "numGeneratedTokens"}
    assert written["kvCacheStats"].keys() == KV_NAMES | {"evictedBlocks", "tiers", "onboarding"}
    ours = {"rowFill", "tokenFill", "bindingLimit"}
    assert written["inflightBatchingStats"].keys() == BATCHING_NAMES | ours


def test_values_survive_json() -> None:
    written = json.loads(json.dumps(iteration_stats().to_json()))
    assert written["iterLatencyMS"] == 4.0
    assert written["kvCacheStats"]["cacheHitRate"] == 0.75
    assert written["inflightBatchingStats"]["bindingLimit"] == "blocks"
    assert written["kvCacheStats"]["onboarding"] == {
        "recomputeDecisions": 0,
        "lateLoads": 2,
        "hostBytesPerSecond": 1e9,
        "diskBytesPerSecond": None,
        "contextTokensPerSecond": None,
    }
    assert written["kvCacheStats"]["tiers"] == [
        {
            "tier": "host",
            "maxBytes": 1000,
            "usedBytes": 64,
            "numBlocks": 0,
            "offloadedBytes": 0,
            "onboardedBytes": 32,
            "droppedBlocks": 0,
            "ioErrors": 0,
            "badFiles": 0,
        }
    ]


def test_requests_have_every_name_of_tensorrt_llm() -> None:
    request = RequestStats(
        id=9,
        stage="CONTEXT_IN_PROGRESS",
        context_prefill_position=32,
        num_generated_tokens=0,
        scheduled=True,
        paused=False,
        reused_blocks_per_request=1,
        missed_blocks_per_request=3,
    )
    written = json.loads(
        json.dumps(RequestStatsPerIteration(iter=4, request_stats=(request,)).to_json())
    )
    assert written.keys() == {"iter", "requestStats"}
    (only,) = written["requestStats"]
    assert only.keys() == REQUEST_NAMES
    assert only["kvCacheHitRatePerRequest"] == 0.25


def test_nothing_looked_up_is_no_division_by_zero() -> None:
    assert kv_stats().cache_hit_rate == 0.0


def test_tiers_are_named_by_their_nearness() -> None:
    assert TIERS == ("host", "disk")


@pytest.mark.parametrize("limit", BindingLimit)
def test_limits_are_written_in_lower_case(limit: BindingLimit) -> None:
    batching = InflightBatchingStats(binding_limit=limit)
    assert batching.to_json()["bindingLimit"] == limit.name.lower()
