"""Reuse through the whole engine: counters, copies before the forward, waiting, retention."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    Request,
    RequestPerfMetrics,
    SchedulerConfig,
    TokenRangeRetentionConfig,
)
from inflight.engine.engine import Engine
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens


class CountingRunner(ArithmeticRunner):
    num_copied = 0

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        self.num_copied += len(target_ids)
        super().copy_blocks(source_ids, target_ids, pool)


def make_engine(
    runner: ArithmeticRunner,
    *,
    num_blocks: int = 100,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    copy_on_partial_reuse: bool = True,
) -> Engine:
    config = ExecutorConfig(
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=200,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=KvCacheConfig(
            tokens_per_block=4,
            num_blocks=num_blocks,
            copy_on_partial_reuse=copy_on_partial_reuse,
        ),
    )
    return Engine(runner, config)


def ask(
    engine: Engine,
    prompts: list[list[int]],
    max_tokens: int,
    retention: KvCacheRetentionConfig | None = None,
) -> tuple[list[list[int]], list[RequestPerfMetrics]]:
    """All at once, to their ends: the tokens and the metrics of each."""
    ids = [engine.next_id() for _ in prompts]
    for request_id, prompt in zip(ids, prompts, strict=True):
        request = Request(
            input_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            kv_cache_retention_config=retention,
        )
        engine.enqueue(request_id, request)
    results = {}
    while engine.loop.has_work:
        engine.loop.step()
        engine.kv.check_integrity()
        for response in engine.outbox.take(None, 0):
            assert response.is_final and response.result is not None, response.error
            results[response.request_id] = response.result
    metrics = [results[i].perf_metrics for i in ids]
    assert all(each is not None for each in metrics)
    return [list(results[i].output_token_ids) for i in ids], metrics  # type: ignore[return-value]


def test_the_same_prompt_twice_counts_as_in_tensorrt_llm() -> None:
    engine = make_engine(ArithmeticRunner())
    prompt = list(range(50, 64))  # 14 tokens in 4 blocks
    for expected in ((4, 4, 0), (1, 1, 4)):
        _, (metrics,) = ask(engine, [prompt], max_tokens=1)
        assert expected == (
            metrics.num_new_allocated_blocks,
            metrics.num_total_allocated_blocks,
            metrics.num_reused_blocks,
        )


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
def test_prompts_that_branch_off_inside_a_block_get_their_own_tokens(
    policy: CapacitySchedulerPolicy, copy: bool
) -> None:
    runner = CountingRunner()
    engine = make_engine(runner, num_blocks=24, policy=policy, copy_on_partial_reuse=copy)
    common = list(range(100, 118))
    asked = [[*common[: 3 + i], 500 + i] for i in range(15)] * 2
    tokens, metrics = ask(engine, asked, max_tokens=9)
    assert tokens == [expected_tokens(prompt, 9) for prompt in asked]
    assert sum(each.num_reused_blocks for each in metrics) > 20
    assert runner.num_copied > 5 or not copy


def test_a_prefix_that_several_bring_at_once_is_computed_once() -> None:
    runner = ArithmeticRunner()
    engine = make_engine(runner)
    common = list(range(100, 140))
    asked = [[*common, 500 + i, 7] for i in range(8)]
    tokens, _ = ask(engine, asked, max_tokens=1)
    assert tokens == [expected_tokens(prompt, 1) for prompt in asked]
    assert sum(runner.rows) == 40 + 8 * 2


@pytest.mark.parametrize(("priority", "kept"), [(90, True), (35, False)])
def test_a_system_prompt_outlives_a_flood_where_the_request_says_so(
    priority: int, kept: bool
) -> None:
    engine = make_engine(ArithmeticRunner(), num_blocks=20)
    system = list(range(100, 116))
    retention = KvCacheRetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetentionConfig(token_start=0, token_end=16, priority=priority),
        ),
        decode_retention_priority=0,
    )
    ask(engine, [[*system, 1]], 2, retention)
    for i in range(10):
        ask(engine, [[200 + i * 20 + j for j in range(20)]], 4)
    _, (metrics,) = ask(engine, [[*system, 2]], 2)
    assert metrics.num_reused_blocks == (4 if kept else 0)
