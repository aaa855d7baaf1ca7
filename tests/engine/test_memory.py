"""The size of the KV pool, from memory and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.api.executor_config import ExecutorConfig, KvCacheConfig, KvTiersConfig
from inflight.engine.memory import num_kv_blocks, pool_size, sizing_line
from inflight.errors import ConfigError
from tests.fakes.arithmetic_runner import ArithmeticRunner

PER_TOKEN = 1000
CONFIG = ExecutorConfig(max_batch_size=4, max_num_tokens=512, max_seq_len=100)
"""At most 4 requests of 7 KV blocks of 16 tokens each."""


def with_kv(**values: object) -> ExecutorConfig:
    return replace(CONFIG, kv_cache_config=KvCacheConfig(tokens_per_block=16, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "free_bytes", "expected"),
    [
        (with_kv(), 1 << 40, (28, "max_batch_size x max_seq_len")),
        (with_kv(), 1_000_000, (18, "kv_cache_free_gpu_mem_fraction")),
        (with_kv(free_memory_fraction=0.5), 800_000, (25, "kv_cache_free_gpu_mem_fraction")),
        (with_kv(max_tokens=100), 1 << 40, (6, "max_tokens_in_paged_kv_cache")),
        (with_kv(num_blocks=1000), 16_000_000, (1000, "num_blocks")),
    ],
)
def test_the_tightest_bound_sets_the_pool(
    config: ExecutorConfig, free_bytes: int, expected: tuple[int, str]
) -> None:
    got = num_kv_blocks(config, kv_bytes_per_token=PER_TOKEN, free_bytes=free_bytes)
    assert got == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_kv(free_memory_fraction=0.1), "kv_cache_free_gpu_mem_fraction: leaves 1 KV blocks"),
        (with_kv(num_blocks=11), "num_blocks: 11 KV blocks of 16000 bytes do not fit into the 0 "),
    ],
)
def test_a_pool_that_cannot_be_is_refused(config: ExecutorConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        num_kv_blocks(config, kv_bytes_per_token=PER_TOKEN, free_bytes=175_000)


def test_the_log_line_says_that_memory_is_taken_later() -> None:
    spec = replace(ArithmeticRunner().spec, kv_bytes_per_token=1 << 16)
    line = sizing_line(with_kv(), spec, 28, "max_batch_size x max_seq_len")
    assert "28 blocks of 16 tokens = 448 tokens, up to 28 MiB on " in line
    assert "taken as blocks are first used, 65536 bytes a token" in line


def test_a_pool_on_a_device_takes_its_share_of_the_devices_memory() -> None:
    spec = replace(ArithmeticRunner().spec, kv_bytes_per_token=PER_TOKEN, kv_memory_bytes=200_000)
    assert pool_size(with_kv(), spec) == (11, "kv_cache_free_gpu_mem_fraction")
    assert pool_size(with_kv(free_memory_fraction=0.5), spec)[0] == 6
    assert "taken now" in sizing_line(with_kv(), spec, 11, "num_blocks")
    with pytest.raises(ConfigError, match="num_blocks: 13 KV blocks .* do not fit into the 0 MiB"):
        pool_size(with_kv(num_blocks=13), spec)


def test_a_host_tier_beside_a_device_must_fit_into_the_host() -> None:
    spec = replace(ArithmeticRunner().spec, kv_memory_bytes=200_000)
    config = with_kv(tiers=KvTiersConfig(host_memory_bytes=1 << 50))
    with pytest.raises(ConfigError, match="kv_cache_host_memory_bytes: .* more than the host has"):
        pool_size(config, spec)
