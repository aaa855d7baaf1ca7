"""What the tiers learn of computing, when the clock moves by what computing and moving take."""

from __future__ import annotations

import pytest

from inflight.api import ExecutorConfig, KvCacheConfig, KvTiersConfig, Request
from inflight.engine.engine import Engine
from inflight.simulator import CostModel
from tests.fakes.clock_runner import ClockRunner

SECONDS_PER_TOKEN = 0.4e-3
TOKENS_PER_BLOCK = 16
COST = CostModel(
    base_seconds=1e-9,
    context_token_seconds=SECONDS_PER_TOKEN,
    generation_row_seconds=0.0,
    context_pair_seconds=0.0,
    generation_pair_seconds=0.0,
)


def ask(engine: Engine, prompt: list[int]) -> None:
    engine.enqueue(
        engine.next_id(), Request(input_token_ids=tuple(prompt), max_tokens=1, end_ids=())
    )
    while engine.loop.has_work:
        engine.loop.step()
    engine.outbox.take(None, 0)


@pytest.mark.parametrize("slowness", [0.5, 3.0])
def test_moving_blocks_does_not_make_computing_look_slow(slowness: float) -> None:
    """``slowness``: of moving a block, against computing it."""
    seconds_per_block = slowness * SECONDS_PER_TOKEN * TOKENS_PER_BLOCK
    runner = ClockRunner(COST, seconds_per_block)
    tiers = KvTiersConfig(host_memory_bytes=1 << 30)
    config = ExecutorConfig(
        max_batch_size=4,
        max_num_tokens=512,
        max_seq_len=2048,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK, num_blocks=140, tiers=tiers
        ),
    )
    engine = Engine(runner, config, clock=lambda: runner.now)
    for number in range(18):  # six beginnings, three times the pool, and always another end
        beginning = [100 * (number % 6) + i for i in range(512)]
        ask(engine, beginning + [(7 * number + i) % 900 for i in range(200)])
    onboarding = engine.kv_cache_stats().onboarding
    engine.close()
    assert onboarding is not None
    assert onboarding.context_tokens_per_second == pytest.approx(1 / SECONDS_PER_TOKEN)
    assert (onboarding.recompute_decisions > 0) == (slowness > 2)
