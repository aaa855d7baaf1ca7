"""Executors over the arithmetic model, small enough that every limit is near."""

from __future__ import annotations

import time
from collections.abc import Callable

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvTiersConfig,
    SchedulerConfig,
)
from inflight.executor import Executor
from tests.fakes.arithmetic_runner import ArithmeticRunner


def make_executor(
    runner: ArithmeticRunner | None = None,
    *,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
    num_blocks: int = 200,
    tokens_per_block: int = 4,
    tiers: KvTiersConfig | None = None,
    end_ids: tuple[int, ...] = (),
    **limits: object,
) -> Executor:
    values: dict[str, object] = {
        "max_batch_size": 8,
        "max_num_tokens": 16,
        "max_seq_len": 200,
        "request_stats_max_iterations": 10,
    }
    config = ExecutorConfig(
        **(values | limits),  # type: ignore[arg-type]
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=policy, context_chunking_policy=chunking
        ),
        kv_cache_config=KvCacheConfig(
            tokens_per_block=tokens_per_block,
            num_blocks=num_blocks,
            tiers=tiers or KvTiersConfig(),
        ),
    )
    return Executor(runner or ArithmeticRunner(), config, end_ids=end_ids)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
