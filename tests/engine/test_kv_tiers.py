"""Tiers through the whole engine: the right text from every tier, and how often it is found."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    Request,
    SchedulerConfig,
)
from inflight.api.stats import KvTiersStats
from inflight.engine.engine import Engine
from inflight.errors import ConfigError
from inflight.executor import Executor
from inflight.kv_cache.tiers.cascade import Place
from inflight.kv_cache.tiers.disk import FOLDER
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
        max_batch_size=8,
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
    engine: Engine, prompts: list[list[int]], max_tokens: int = MAX_TOKENS, salt: str | None = None
) -> None:
    """All at once, to their ends; every token must be right, and the books after every step."""
    asked = {engine.next_id(): prompt for prompt in prompts}
    for request_id, prompt in asked.items():
        engine.enqueue(
            request_id,
            Request(input_token_ids=tuple(prompt), max_tokens=max_tokens, cache_salt=salt),
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


def stats(engine: Engine) -> KvTiersStats:
    assert engine.onboarder is not None
    return engine.onboarder.tiers.stats()


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


def test_a_working_set_three_times_the_pool_hits_as_far_as_the_tiers_reach(tmp_path: Path) -> None:
    with engine_with() as engine:
        without = rounds(engine, 2)
    with engine_with(host_blocks=12) as engine:
        always_onboard(engine)
        small_host = rounds(engine, 2)
    with engine_with(host_blocks=100) as engine:
        always_onboard(engine)
        host = rounds(engine, 2)
        assert stats(engine).onboarded_host_blocks > 0
        assert stats(engine).onboarded_disk_blocks == 0
    with engine_with(host_blocks=12, disk=tmp_path) as engine:
        always_onboard(engine)
        both = rounds(engine, 2)
        assert stats(engine).onboarded_disk_blocks > 0
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
        assert stats(engine).onboarded_disk_blocks > 0


def test_a_persisted_disk_is_used_after_a_restart_and_salts_stay_apart(tmp_path: Path) -> None:
    with engine_with(host_blocks=4, disk=tmp_path, persist=True) as engine:
        for prompt in PROMPTS:
            ask(engine, [prompt], salt="a")
            settle(engine)
    with engine_with(host_blocks=4, disk=tmp_path, persist=True) as engine:
        always_onboard(engine)
        ask(engine, [PROMPTS[0]])
        ask(engine, [PROMPTS[0]], salt="b")
        assert engine.kv.stats().reused_blocks == 0
        ask(engine, [PROMPTS[0]], salt="a")
        assert stats(engine).onboarded_disk_blocks == 5
        assert engine.kv.stats().reused_blocks == 5


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path, persist=True) as engine:
        one_round(engine)
    with engine_with(disk=tmp_path, persist=True, identity="another") as engine:
        ask(engine, PROMPTS)
        assert stats(engine).onboarded_disk_blocks == 0
        assert stats(engine).disk_bad_files > 0


def test_persistence_needs_a_known_model(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="kv_cache_disk_persist"),
        engine_with(disk=tmp_path, persist=True, identity=None),
    ):
        pass


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
        assert (stats(engine).disk_bad_files > 0) == (damage != "delete")


class SlowDisk:
    """Stands in for ``DiskStorage.get``: nothing comes for as long as anybody waits."""

    def __init__(self, engine: Engine) -> None:
        assert engine.onboarder is not None and engine.onboarder.tiers.cascade.disk is not None
        self.is_read = False
        engine.onboarder.tiers.cascade.disk.get = self.get  # type: ignore[method-assign]

    def get(self, key: object) -> None:
        self.is_read = True
        time.sleep(1.0)


def test_a_slow_disk_holds_up_one_request_for_as_long_as_computing_takes(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        assert engine.onboarder is not None
        cost = engine.onboarder.tiers.cost
        for _ in range(50):
            # The model computes 20 tokens in 0.1 s, and the disk seems to be much faster.
            type(cost.context).observe(cost.context, 200, 1.0)
            cost.bandwidth[Place.DISK].observe(10**9, 1.0)
        disk = SlowDisk(engine)
        ask(engine, [PROMPTS[0]])
        assert disk.is_read and stats(engine).late_loads == 1
        ask(engine, [PROMPTS[5]])


def test_others_go_on_while_one_waits_for_the_disk(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        SlowDisk(engine)
        waiting, running = engine.next_id(), engine.next_id()
        engine.enqueue(waiting, Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=1))
        engine.enqueue(running, Request(input_token_ids=(7, 8, 9), max_tokens=2))
        finished = []
        while len(finished) < 2:
            engine.loop.step()
            finished += [response.request_id for response in engine.outbox.take(None, 0)]
        assert finished == [running, waiting]


def test_a_cancelled_request_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        SlowDisk(engine)
        request_id = engine.next_id()
        engine.enqueue(request_id, Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=1))
        engine.loop.step()
        assert engine.onboarder is not None and engine.onboarder.tiers.is_loading
        engine.inbox.cancel(request_id)
        engine.loop.step()
        assert not engine.loop.has_work and not engine.onboarder.tiers.is_loading


def test_where_computing_is_faster_nothing_is_brought_back() -> None:
    with engine_with(host_blocks=100) as engine:
        one_round(engine)
        assert engine.onboarder is not None
        cost = engine.onboarder.tiers.cost
        for _ in range(50):
            cost.bandwidth[Place.HOST].observe(1, 1.0)
        ask(engine, [PROMPTS[0]])
        assert stats(engine).onboarded_blocks == 0 and stats(engine).recompute_decisions == 1


def test_nothing_is_brought_back_where_that_is_off() -> None:
    with engine_with(host_blocks=100, onboard=False) as engine:
        assert rounds(engine, 1) == 0
        assert stats(engine).offloaded_blocks > 0 and stats(engine).onboarded_blocks == 0


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
        came_back = stats(engine).onboarded_host_blocks > 0
        assert came_back == (pause_policy is not KvCachePausePolicy.RECOMPUTE)


def test_a_host_tier_larger_than_memory_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="kv_cache_host_memory_bytes"),
        engine_with(host_blocks=1 << 50),
    ):
        pass


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
    assert last.kv_tiers_stats is not None and last.kv_tiers_stats.offloaded_blocks > 0
    assert last.to_json()["kvTiersStats"]["host"]["maxBytes"] == 4 * BLOCK_BYTES
    assert set(threading.enumerate()) == before


class BrokenMemory(ArithmeticRunner):
    """Blocks cannot be written for a while."""

    is_broken = False

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: npt.NDArray[np.uint8]
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
        assert stats(engine).onboarded_blocks == 0
        assert engine.kv.stats().reused_blocks == 0
