"""An engine with KV tiers over the arithmetic model, and prompts three times its pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCachePausePolicy,
    KvCacheRetentionConfig,
    KvTiersConfig,
    Request,
    SchedulerConfig,
)
from inflight.api.stats import KvOnboardingStats, KvTierStats
from inflight.engine.engine import Engine
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens

TOKENS_PER_BLOCK = 4
BLOCK_BYTES = TOKENS_PER_BLOCK * ArithmeticRunner().spec.kv_bytes_per_token
NUM_BLOCKS = 12
MAX_TOKENS = 3
PROMPTS = [[100 * n + i for i in range(24)] for n in range(1, 7)]
"""36 blocks: three times the primary pool."""


@contextmanager
def engine_with(
    *,
    host_blocks: int = 0,
    disk: Path | None = None,
    disk_blocks: int = 1000,
    persist: bool = False,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    pause_policy: KvCachePausePolicy = KvCachePausePolicy.AUTO,
    onboard: bool = True,
    identity: str | None = "model",
    runner: ArithmeticRunner | None = None,
    num_blocks: int = NUM_BLOCKS,
    max_batch_size: int = 8,
) -> Iterator[Engine]:
    tiers = KvTiersConfig(
        host_memory_bytes=host_blocks * BLOCK_BYTES,
        disk_bytes=0 if disk is None else disk_blocks * 1000,
        disk_path="" if disk is None else str(disk),
        disk_persist=persist,
        pause_policy=pause_policy,
        onboard_blocks=onboard,
    )
    config = ExecutorConfig(
        max_batch_size=max_batch_size,
        max_num_tokens=32,
        max_seq_len=4 * num_blocks,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK, num_blocks=num_blocks, tiers=tiers
        ),
    )
    engine = Engine(runner or ArithmeticRunner(), config, model_identity=identity)
    try:
        yield engine
    finally:
        engine.close()


def ask(
    engine: Engine,
    prompts: list[list[int]],
    max_tokens: int = MAX_TOKENS,
    salt: str | None = None,
    retention: KvCacheRetentionConfig | None = None,
) -> None:
    """All at once, to their ends; every token must be right, and the books after every step."""
    asked = {engine.next_id(): prompt for prompt in prompts}
    for request_id, prompt in asked.items():
        engine.enqueue(
            request_id,
            Request(
                input_token_ids=tuple(prompt),
                max_tokens=max_tokens,
                cache_salt=salt,
                kv_cache_retention_config=retention,
            ),
        )
    answers = {}
    for _ in range(100_000):
        if not engine.loop.has_work:
            break
        engine.loop.step()
        engine.kv.check_integrity()
        for response in engine.outbox.take(None, 0):
            assert response.result is not None, response.error
            answers[response.request_id] = list(response.result.output_token_ids)
    for request_id, prompt in asked.items():
        assert answers[request_id] == expected_tokens(prompt, max_tokens)


def tier(engine: Engine, name: str) -> KvTierStats:
    (found,) = (each for each in engine.kv_cache_stats().tiers if each.tier == name)
    return found


def onboarding(engine: Engine) -> KvOnboardingStats:
    stats = engine.kv_cache_stats().onboarding
    assert stats is not None
    return stats


def onboarded(engine: Engine, name: str) -> int:
    """Blocks."""
    return tier(engine, name).onboarded_bytes // BLOCK_BYTES


def settle(engine: Engine) -> None:
    """What goes to the disk is there."""
    assert engine.onboarder is not None
    assert engine.onboarder.tiers.cascade.wait_until_written(10.0)


def always_onboard(engine: Engine) -> None:
    """As if computing were very slow; the fake model computes faster than any memory."""
    assert engine.onboarder is not None
    engine.onboarder.tiers.cost.context.observe = lambda amount, seconds: None  # type: ignore[method-assign]


def one_round(engine: Engine) -> None:
    """Every prompt, one after the other; when it ends, all that was evicted is in its tier."""
    for prompt in PROMPTS:
        ask(engine, [prompt])
        if engine.onboarder is not None:
            settle(engine)


def rounds(engine: Engine, number: int) -> float:
    """The hit rate of this many rounds after a first one."""
    one_round(engine)
    before = engine.kv.stats()
    for _ in range(number):
        one_round(engine)
    after = engine.kv.stats()
    reused = after.reused_blocks - before.reused_blocks
    return reused / (reused + after.missed_blocks - before.missed_blocks)
