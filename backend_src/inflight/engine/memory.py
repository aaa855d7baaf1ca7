"""How much memory there is, and how many KV blocks that makes."""

from __future__ import annotations

import resource
from pathlib import Path

from inflight.api.executor_config import ExecutorConfig
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


def pool_size(config: ExecutorConfig, spec: ModelSpec) -> tuple[int, str]:
    """Blocks of the pool, and what set the number, in the memory that the KV cache of ``spec`` lies
    in. Raises ConfigError as ``num_kv_blocks`` does."""
    per_token, tiers = spec.kv_bytes_per_token, config.kv_cache_config.tiers
    host_bytes = available_bytes() - tiers.host_memory_bytes
    if spec.kv_memory_bytes is None:
        return num_kv_blocks(config, kv_bytes_per_token=per_token, free_bytes=host_bytes)
    if host_bytes <= 0:
        raise ConfigError(
            f"kv_cache_host_memory_bytes: {tiers.host_memory_bytes} bytes are more than the host "
            "has free"
        )
    return num_kv_blocks(
        config,
        kv_bytes_per_token=per_token,
        free_bytes=spec.kv_memory_bytes,
        default_fraction=DEFAULT_GPU_FRACTION,
    )


def num_kv_blocks(
    config: ExecutorConfig,
    *,
    kv_bytes_per_token: int,
    free_bytes: int,
    default_fraction: float = DEFAULT_CPU_FRACTION,
) -> tuple[int, str]:
    """Blocks of the pool and the name of what set the number.

    The smallest of: the fraction of ``free_bytes``, ``max_tokens``, and what ``max_batch_size``
    requests of ``max_seq_len`` could ever hold. ``num_blocks`` overrides them all. On a host the
    pool takes its memory as blocks are first written: that it is free now is checked here, nobody
    keeps it free. Raises ConfigError when not even one request of two blocks fits, or when
    ``num_blocks`` are more than fit. ``free_bytes``: what the host tier leaves; not positive is an
    error as well.
    """
    kv = config.kv_cache_config
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


def sizing_line(config: ExecutorConfig, spec: ModelSpec, num_blocks: int, bound: str) -> str:
    """What the pool is, how many requests fit, and which limit binds first: one log line."""
    per_block = config.kv_cache_config.tokens_per_block
    tokens = num_blocks * per_block
    typical = min(TYPICAL_SEQ_LEN, config.max_seq_len)
    fit_typical = num_blocks // -(-typical // per_block)
    fit_longest = num_blocks // -(-config.max_seq_len // per_block)
    taken = "taken as blocks are first used" if spec.kv_memory_bytes is None else "taken now"
    binding = "max_batch_size" if fit_typical >= config.max_batch_size else "the KV cache"
    return (
        f"KV cache: {num_blocks} blocks of {per_block} tokens = {tokens} tokens, "
        f"up to {num_blocks * per_block * spec.kv_bytes_per_token / 2**20:.0f} MiB on "
        f"{spec.device}, {taken}, {spec.kv_bytes_per_token} bytes a token "
        f"(set by {bound}); fits {fit_typical} requests of {typical} tokens or "
        f"{fit_longest} of max_seq_len {config.max_seq_len}; max_batch_size "
        f"{config.max_batch_size}, max_num_tokens {config.max_num_tokens}; {binding} binds first"
    )


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
