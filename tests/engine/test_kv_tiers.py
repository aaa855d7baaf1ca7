"""Tiers through the whole engine: the right text from every tier, and how often it is found."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCachePausePolicy,
    KvTiersConfig,
)
from inflight.engine.engine import Engine
from inflight.errors import ConfigError
from inflight.executor import Executor
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.cascade import Place
from inflight.kv_cache.tiers.folder import FOLDER
from inflight.kv_cache.tiers.storage import TierBlock
from tests.engine.tiered_engine import (
    BLOCK_BYTES,
    MAX_TOKENS,
    NUM_BLOCKS,
    PROMPTS,
    TOKENS_PER_BLOCK,
    always_onboard,
    ask,
    engine_with,
    onboarded,
    onboarding,
    one_round,
    rounds,
    settle,
    tier,
)
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens


def test_a_working_set_three_times_the_pool_hits_as_far_as_the_tiers_reach(tmp_path: Path) -> None:
    with engine_with() as engine:
        without = rounds(engine, 2)
    with engine_with(host_blocks=12) as engine:
        always_onboard(engine)
        small_host = rounds(engine, 2)
    with engine_with(host_blocks=100) as engine:
        always_onboard(engine)
        host = rounds(engine, 2)
        assert onboarded(engine, "host") > 0
        assert [each.tier for each in engine.kv_cache_stats().tiers] == ["host"]
    with engine_with(host_blocks=12, disk=tmp_path) as engine:
        always_onboard(engine)
        both = rounds(engine, 2)
        assert onboarded(engine, "disk") > 0
    print(f"hit rate: none {without:.2f}, host {small_host:.2f} / {host:.2f}, + disk {both:.2f}")
    assert without == small_host == 0, "a cycle larger than an LRU cache never hits"
    # Of 6 blocks of a prompt the last is never reused whole, as one token is left to compute.
    assert host == both >= 5 / 6


def test_a_disk_alone_serves_as_well(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        assert rounds(engine, 1) >= 5 / 6
    assert list((tmp_path / FOLDER).glob("*.kvblock")) == []


def test_prompts_together_get_the_right_text_from_the_tiers(tmp_path: Path) -> None:
    with engine_with(host_blocks=8, disk=tmp_path) as engine:
        always_onboard(engine)
        for _ in range(4):
            ask(engine, PROMPTS)
            settle(engine)
        assert onboarded(engine, "disk") > 0


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damaged_blocks_are_computed_again(tmp_path: Path, damage: str) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        for path in sorted((tmp_path / FOLDER).glob("*.kvblock"))[::2]:
            if damage == "truncate":
                os.truncate(path, path.stat().st_size // 2)
            elif damage == "flip":
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            else:
                path.unlink()
        for prompt in PROMPTS:
            ask(engine, [prompt])
        assert (tier(engine, "disk").bad_files > 0) == (damage != "delete")


def test_where_computing_is_faster_nothing_is_brought_back() -> None:
    with engine_with(host_blocks=100) as engine:
        one_round(engine)
        assert engine.onboarder is not None
        cost = engine.onboarder.tiers.cost
        for _ in range(50):
            cost.bandwidth[Place.HOST].observe(1, 1.0)
        ask(engine, [PROMPTS[0]])
        assert onboarded(engine, "host") == 0
        assert onboarding(engine).recompute_decisions == 1


def test_nothing_is_brought_back_where_that_is_off() -> None:
    with engine_with(host_blocks=100, onboard=False) as engine:
        assert rounds(engine, 1) == 0
        assert tier(engine, "host").offloaded_bytes > 0 and onboarded(engine, "host") == 0


@pytest.mark.parametrize("pause_policy", KvCachePausePolicy)
def test_paused_requests_come_back_as_their_policy_says(pause_policy: KvCachePausePolicy) -> None:
    with engine_with(
        host_blocks=100,
        policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
        pause_policy=pause_policy,
        num_blocks=30,
    ) as engine:
        assert engine.onboarder is not None
        cost = engine.onboarder.tiers.cost
        if pause_policy is KvCachePausePolicy.OFFLOAD:
            cost.bandwidth[Place.HOST].observe(1, 1.0)  # whatever it costs
        else:
            always_onboard(engine)
        prompts = [[1000 * n + i for i in range(8)] for n in range(1, 7)]
        ask(engine, prompts, max_tokens=80)
        pauses = sum(
            each.inflight_batching_stats.num_paused_requests
            for each in engine.stats.take_iterations()
        )
        assert pauses > 0, "the pool was meant to be too small"
        came_back = onboarded(engine, "host") > 0
        assert came_back == (pause_policy is not KvCachePausePolicy.RECOMPUTE)


def test_a_paused_request_waits_for_the_disk_where_its_policy_says_offload(tmp_path: Path) -> None:
    with engine_with(
        disk=tmp_path,
        policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
        pause_policy=KvCachePausePolicy.OFFLOAD,
        num_blocks=30,
    ) as engine:
        assert engine.onboarder is not None
        tiers = engine.onboarder.tiers
        for _ in range(50):
            tiers.cost.context.observe(10**6, 1.0)  # computing would be much faster
        always_onboard(engine)  # and that stays so
        disk = tiers.cascade.disk
        assert disk is not None
        get = disk.get

        def slow_get(key: BlockKey) -> TierBlock | None:
            time.sleep(0.002)
            return get(key)

        disk.get = slow_get  # type: ignore[method-assign]
        ask(engine, [[1000 * n + i for i in range(8)] for n in range(1, 7)], max_tokens=80)
        assert onboarding(engine).late_loads == 0 and onboarded(engine, "disk") > 0


@pytest.mark.parametrize(
    ("tiers", "windows", "said"),
    [
        (KvTiersConfig(), (6,), ""),
        (KvTiersConfig(host_memory_bytes=1000), (None,), ""),
        (KvTiersConfig(host_memory_bytes=1000), (100,), ""),
        (KvTiersConfig(host_memory_bytes=1000), (None, 6), "those with a sliding window keep all"),
        (
            KvTiersConfig(pause_policy=KvCachePausePolicy.OFFLOAD, onboard_blocks=False),
            (None,),
            "kv_cache_pause_policy, kv_cache_onboard_blocks: without effect",
        ),
        (
            KvTiersConfig(host_memory_bytes=1000, disk_path="anywhere"),
            (None,),
            "kv_cache_disk_path: without effect, as no such KV tier is configured",
        ),
    ],
)
def test_what_has_no_effect_is_said_in_a_line(
    caplog: pytest.LogCaptureFixture,
    tiers: KvTiersConfig,
    windows: tuple[int | None, ...],
    said: str,
) -> None:
    kv_cache = KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, num_blocks=NUM_BLOCKS, tiers=tiers)
    config = ExecutorConfig(max_seq_len=16, kv_cache_config=kv_cache)
    Engine(ArithmeticRunner(windows=windows), config).close()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == bool(said) and said in "".join(warnings)


def test_tiers_without_reuse_are_refused() -> None:
    with pytest.raises(ConfigError, match="need enable_kv_cache_reuse"):
        KvCacheConfig(enable_block_reuse=False, tiers=KvTiersConfig(host_memory_bytes=1000))


def test_a_host_tier_larger_than_memory_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="kv_cache_host_memory_bytes"),
        engine_with(host_blocks=1 << 50),
    ):
        pass


@pytest.mark.parametrize("key", ["kv_cache_host_memory_bytes", "kv_cache_disk_bytes"])
def test_a_tier_smaller_than_a_block_is_refused(tmp_path: Path, key: str) -> None:
    field = key.removeprefix("kv_cache_")
    tiers = KvTiersConfig(disk_path=str(tmp_path), **{field: BLOCK_BYTES - 1})  # type: ignore[arg-type]
    config = ExecutorConfig(
        max_seq_len=16,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK, num_blocks=NUM_BLOCKS, tiers=tiers
        ),
    )
    with pytest.raises(ConfigError, match=key):
        Engine(ArithmeticRunner(), config)


def test_an_executor_answers_from_its_tiers_and_ends_their_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    tiers = KvTiersConfig(
        host_memory_bytes=4 * BLOCK_BYTES, disk_bytes=1 << 20, disk_path=str(tmp_path)
    )
    config = ExecutorConfig(
        max_batch_size=8,
        max_num_tokens=32,
        max_seq_len=48,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK, num_blocks=NUM_BLOCKS, tiers=tiers
        ),
    )
    with Executor(ArithmeticRunner(), config) as executor:
        for _ in range(3):
            for output, prompt in zip(
                executor.generate(PROMPTS, max_tokens=MAX_TOKENS), PROMPTS, strict=True
            ):
                assert list(output.token_ids) == expected_tokens(prompt, MAX_TOKENS)
        last = executor.get_latest_iteration_stats()[-1]
    host, disk = last.to_json()["kvCacheStats"]["tiers"]
    assert (host["tier"], host["maxBytes"]) == ("host", 4 * BLOCK_BYTES)
    assert host["offloadedBytes"] > 0 and disk["offloadedBytes"] > 0
    assert last.to_json()["kvCacheStats"]["onboarding"]["hostBytesPerSecond"] is not None
    assert set(threading.enumerate()) == before


class BrokenMemory(ArithmeticRunner):
    """Blocks cannot be written for a while."""

    is_broken = False

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        if self.is_broken:
            raise RuntimeError("no")
        super().write_blocks(block_ids, contents)


def test_blocks_that_cannot_be_written_are_computed_again() -> None:
    runner = BrokenMemory()
    with engine_with(host_blocks=100, runner=runner) as engine:
        one_round(engine)
        runner.is_broken = True
        ask(engine, [PROMPTS[0]])
        assert onboarded(engine, "host") == 0
        assert engine.kv.stats().reused_blocks == 0
