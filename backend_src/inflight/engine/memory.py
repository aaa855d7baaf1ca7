"""How much memory there is, and how many KV blocks that makes."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inflight.api.executor_config import ExecutorConfig
from inflight.api.kv_pools import KvPool, most_blocks
from inflight.errors import ConfigError
from inflight.model.runner import ModelSpec

DEFAULT_CPU_FRACTION = 0.3
DEFAULT_GPU_FRACTION = 0.9
TYPICAL_SEQ_LEN = 1024
_PAGE = resource.getpagesize()


def resident_bytes() -> int:
    """Resident set of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * _PAGE


def available_bytes() -> int:
    """Memory this process may still take: the smaller of the machine's and the cgroup's."""
    candidates = [_meminfo_available()]
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        candidates.append(max(0, limit - used))
    return min(candidates)


class KvMemory(NamedTuple):
    """What the KV cache is made in."""

    free_bytes: int
    """What the weights, the largest forward and the host tier leave; may be negative."""
    default_fraction: float = DEFAULT_CPU_FRACTION
    """Of these bytes the KV cache may take, where no key says otherwise."""


def kv_memory(config: ExecutorConfig, spec: ModelSpec) -> KvMemory:
    """The memory that the KV cache of ``spec`` will lie in. Raises ConfigError where the host tier
    beside a device does not fit into the host."""
    host_tier = config.kv_cache_config.tiers.host_memory_bytes
    host_bytes = available_bytes() - host_tier
    if spec.kv_memory_bytes is None:
        return KvMemory(host_bytes)
    if host_bytes <= 0:
        raise ConfigError(
            f"kv_cache_host_memory_bytes: {host_tier} bytes are more than the host has free"
        )
    return KvMemory(spec.kv_memory_bytes, DEFAULT_GPU_FRACTION)


def num_kv_blocks(
    config: ExecutorConfig, *, kv_bytes_per_token: int, memory: KvMemory
) -> tuple[int, str]:
    """Blocks of the pool and the name of what set the number.

    The smallest of: the fraction of ``memory``, ``max_tokens``, and what ``max_batch_size``
    requests of ``max_seq_len`` could ever hold. ``num_blocks`` overrides them all. On a host the
    pool takes its memory as blocks are first written: that it is free now is checked here, nobody
    keeps it free. Raises ConfigError when not even one request of two blocks fits, or when
    ``num_blocks`` are more than fit, or when the host tier leaves nothing.
    """
    kv = config.kv_cache_config
    free_bytes, default_fraction = memory
    if free_bytes <= 0:
        raise ConfigError(
            f"kv_cache_host_memory_bytes: {kv.tiers.host_memory_bytes} bytes leave no memory for "
            "the KV cache itself"
        )
    per_block = kv_bytes_per_token * kv.tokens_per_block
    if kv.num_blocks is not None:
        if kv.num_blocks * per_block > free_bytes:
            raise ConfigError(
                f"num_blocks: {kv.num_blocks} KV blocks of {per_block} bytes do not fit into the "
                f"{free_bytes >> 20} MiB that are free"
            )
        return kv.num_blocks, "num_blocks"
    fraction = kv.free_memory_fraction or default_fraction
    most = config.max_batch_size * -(-config.max_seq_len // kv.tokens_per_block)
    bounds = [
        (int(free_bytes * fraction) // per_block, "kv_cache_free_gpu_mem_fraction"),
        (most, "max_batch_size x max_seq_len"),
    ]
    if kv.max_tokens is not None:
        bounds.append((kv.max_tokens // kv.tokens_per_block, "max_tokens_in_paged_kv_cache"))
    blocks, reason = min(bounds)
    if blocks < 2:
        raise ConfigError(
            f"{reason}: leaves {blocks} KV blocks of {kv.tokens_per_block} tokens "
            f"({per_block} bytes each); at least 2 are needed"
        )
    return blocks, reason


def sizing_line(
    config: ExecutorConfig, spec: ModelSpec, pools: Sequence[KvPool], bound: str
) -> str:
    """What the pools are, how many requests fit, and which limit binds first: one log line."""
    per_block = config.kv_cache_config.tokens_per_block
    typical = min(TYPICAL_SEQ_LEN, config.max_seq_len)
    fit_typical = num_fitting(pools, typical, per_block)
    fit_longest = num_fitting(pools, config.max_seq_len, per_block)
    num_bytes = sum(pool.num_blocks * per_block * pool.group.bytes_per_token for pool in pools)
    taken = "taken as blocks are first used" if spec.kv_memory_bytes is None else "taken now"
    binding = "max_batch_size" if fit_typical >= config.max_batch_size else "the KV cache"
    return (
        f"KV cache: {' and '.join(_described(pool, per_block) for pool in pools)}, "
        f"up to {num_bytes / 2**20:.0f} MiB on "
        f"{spec.device}, {taken}, {spec.kv_bytes_per_token} bytes a token "
        f"(set by {bound}); fits {fit_typical} requests of {typical} tokens or "
        f"{fit_longest} of max_seq_len {config.max_seq_len}; max_batch_size "
        f"{config.max_batch_size}, max_num_tokens {config.max_num_tokens}; {binding} binds first"
    )


def num_fitting(pools: Sequence[KvPool], num_tokens: int, tokens_per_block: int) -> int:
    """Generating requests of so many tokens."""
    return min(
        num_blocks
        // most_blocks(num_tokens, group.window, chunk=1, tokens_per_block=tokens_per_block)
        for group, num_blocks in pools
    )


def _described(pool: KvPool, tokens_per_block: int) -> str:
    tokens = pool.num_blocks * tokens_per_block
    blocks = f"{pool.num_blocks} blocks of {tokens_per_block} tokens = {tokens} tokens"
    if pool.window is None:
        return blocks
    return f"{blocks} for {len(pool.layers)} layers with a window of {pool.window}"


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
