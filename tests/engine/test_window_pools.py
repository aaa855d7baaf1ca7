"""Sliding windows through the whole engine: pools too small for a sequence that they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.api import CapacitySchedulerPolicy, ExecutorConfig, KvCacheConfig, KvTiersConfig
from inflight.api.kv_pools import KvGroup
from inflight.engine.memory import KvMemory, sizing_line
from inflight.engine.pools import kv_pools, layer_groups
from inflight.errors import InvalidRequestError
from inflight.executor import Executor
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens

Windows = tuple[int | None, ...]


def config(num_blocks: int | None = None, **changes: object) -> ExecutorConfig:
    base = ExecutorConfig(
        max_batch_size=4,
        max_num_tokens=16,
        max_seq_len=400,
        kv_cache_config=KvCacheConfig(tokens_per_block=4, num_blocks=num_blocks),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
def test_a_pool_serves_sequences_that_it_cannot_hold_whole(policy: CapacitySchedulerPolicy) -> None:
    """12 blocks of 4 tokens, four answers of 150 tokens after prompts of 100."""
    runner = ArithmeticRunner(windows=(8,))
    limits = config(12)
    scheduler = replace(limits.scheduler_config, capacity_scheduler_policy=policy)
    prompts = [[(7 * number + i) % 50 for i in range(100)] for number in range(4)]
    with Executor(runner, replace(limits, scheduler_config=scheduler)) as executor:
        outputs = executor.generate(prompts, max_tokens=150)
    assert runner.num_blocks == [12]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, 150, windows=(8,))


@pytest.mark.parametrize("windows", [(None, 8), (8, None, 8), (5, 20), (None, 3, 8)])
def test_layers_of_several_windows_read_what_they_see(windows: Windows) -> None:
    runner = ArithmeticRunner(windows=windows)
    prompts = [[5] * 20 + [number] * (5 + number) for number in range(12)]
    with Executor(runner, config(60)) as executor:
        outputs = executor.generate(prompts, max_tokens=60)
    assert len(runner.num_blocks) == len(set(windows))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, 60, windows=windows)


@pytest.mark.parametrize("windows", [(8,), (None, 8)])
def test_a_prefix_is_reused_with_windows(windows: Windows) -> None:
    runner = ArithmeticRunner(windows=windows)
    prompt = list(range(40))
    with Executor(runner, config(60)) as executor:
        first = executor.generate([prompt], max_tokens=20)[0]
        longer = [*prompt, *first.token_ids, 1, 2, 3]
        num_rows = sum(runner.rows)
        second = executor.generate([longer], max_tokens=20)[0]
        assert sum(runner.rows) - num_rows == 1 + 3 + 19, "the KV of 59 tokens was written"
    assert list(second.token_ids) == expected_tokens(longer, 20, windows=windows)


def test_a_request_that_not_even_an_empty_pool_can_serve_is_refused() -> None:
    """A chunk of 16 tokens and the 7 before it lie in up to 7 blocks."""
    with Executor(ArithmeticRunner(windows=(8,)), config(6)) as executor:
        with pytest.raises(InvalidRequestError, match="exceed the whole KV cache"):
            executor.generate([[1] * 30], max_tokens=100)
        assert executor.generate([[1] * 12], max_tokens=10)
    with Executor(ArithmeticRunner(windows=(8,)), config(7)) as executor:
        assert executor.generate([[1] * 30], max_tokens=100)


def test_with_tiers_all_layers_share_a_pool_and_keep_everything() -> None:
    tiers = KvCacheConfig(
        tokens_per_block=4, num_blocks=60, tiers=KvTiersConfig(host_memory_bytes=1 << 16)
    )
    runner = ArithmeticRunner(windows=(None, 8))
    with Executor(runner, config(kv_cache_config=tiers)) as executor:
        output = executor.generate([[3] * 30], max_tokens=60)[0]
    assert runner.num_blocks == [60]
    assert list(output.token_ids) == expected_tokens([3] * 30, 60, windows=(None, 8))


def test_a_window_that_nobody_outgrows_is_none() -> None:
    spec = ArithmeticRunner(windows=(400, 8, 399, None)).spec
    groups = layer_groups(spec, config())
    assert groups == (
        KvGroup(None, (0, 3), 16),
        KvGroup(8, (1,), 8),
        KvGroup(399, (2,), 8),
    )
    assert layer_groups(ArithmeticRunner(windows=(400,)).spec, config()) == (
        KvGroup(None, (0,), 8),
    )


GROUPS = (KvGroup(None, (0,), 100), KvGroup(128, (1, 2, 3), 300))
LARGE = ExecutorConfig(
    max_batch_size=400,
    max_num_tokens=512,
    max_seq_len=4096,
    kv_cache_config=KvCacheConfig(tokens_per_block=32, free_memory_fraction=0.5),
)


def test_memory_is_divided_so_that_the_pools_run_out_together() -> None:
    """1,024 tokens are 32 blocks without a window, and with one of 128 tokens in generation 5."""
    pools, bound = kv_pools(LARGE, GROUPS, KvMemory(128 << 20))
    full, windowed = (pool.num_blocks for pool in pools)
    assert bound == "kv_cache_free_gpu_mem_fraction"
    assert windowed == -(-full * 5 // 32) + 512 // 32
    num_bytes = 32 * (full * 100 + windowed * 300)
    assert 0.998 < num_bytes / (64 << 20) <= 1
    alone, _ = kv_pools(LARGE, [KvGroup(None, (0, 1, 2, 3), 400)], KvMemory(128 << 20))
    assert full > 2.7 * alone[0].num_blocks


def test_what_a_window_leaves_is_the_first_pools() -> None:
    """With 20 requests at most; each holds 21 blocks of the window while it is a context."""
    limits = replace(LARGE, max_batch_size=20, max_seq_len=32768)
    pools, bound = kv_pools(limits, GROUPS, KvMemory(32 << 20))
    full, windowed = (pool.num_blocks for pool in pools)
    assert bound == "kv_cache_free_gpu_mem_fraction"
    assert windowed == 20 * 21 < full * 5 // 32
    assert 0.998 < 32 * (full * 100 + windowed * 300) / (16 << 20) <= 1


def test_the_pools_are_said_in_the_log_line() -> None:
    pools, bound = kv_pools(LARGE, GROUPS, KvMemory(128 << 20))
    spec = replace(ArithmeticRunner().spec, kv_bytes_per_token=400)
    line = sizing_line(LARGE, spec, pools, bound)
    assert f"and {pools[1].num_blocks} blocks of 32 tokens" in line
    assert "for 3 layers with a window of 128, up to 64 MiB" in line


@pytest.mark.parametrize("num_blocks", [2, 3, 10, 31, 32, 1000])
def test_who_fits_into_the_first_pool_fits_into_the_others(num_blocks: int) -> None:
    limits = replace(
        LARGE, kv_cache_config=KvCacheConfig(tokens_per_block=32, num_blocks=num_blocks)
    )
    pools, _ = kv_pools(limits, GROUPS, KvMemory(1 << 40))
    longest = (128 - 1 + 512 - 1 + 31) // 32 + 1
    assert pools[0].num_blocks == num_blocks
    assert min(num_blocks, longest) <= pools[1].num_blocks <= num_blocks
