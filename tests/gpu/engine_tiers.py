"""KV tiers of the engine: blocks to and from the host, and prompts that come back from there."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from inflight.model.device.runner import DeviceRunner
from tests.gpu.engine_bench import Bench, free_memory
from tests.gpu.rows import Outcome, Row, emit

NUM_PROMPTS = 12
TOKENS_PER_BLOCK = 32
MANY_BLOCKS = 8


def measure_tiers(bench: Bench) -> None:
    """Prompts of three times the pool, each asked for twice: what the second answer takes."""
    length = bench.scale.context_length
    blocks_of_prompt = -(-(length + 1) // TOKENS_PER_BLOCK)
    pool_tokens = NUM_PROMPTS // 3 * blocks_of_prompt * TOKENS_PER_BLOCK
    host_bytes = 4 * pool_tokens * bench.work.kv_bytes_per_token
    without, _ = _seconds_again(bench, pool_tokens, 0)
    free_memory(bench.device)
    with_tier, onboarded = _seconds_again(bench, pool_tokens, host_bytes)
    free_memory(bench.device)
    what = f"{bench.name} prompt of {length} tokens again, with its KV in host memory"
    if not onboarded:
        note = "nothing came back: computing it again was measured to be cheaper"
        emit(Row(what=what, outcome=Outcome.SKIPPED, note=note))
        return
    note = f"as fast as without: {1000 * with_tier:.1f} ms; {onboarded >> 20} MiB came back"
    emit(Row(what=what, value=without / with_tier, unit="times", target=1.0, note=note))


def _seconds_again(bench: Bench, pool_tokens: int, host_bytes: int) -> tuple[float, int]:
    """Seconds of a prompt in the second round, and bytes that came back from the host."""
    prompts = bench.prompts(NUM_PROMPTS, bench.scale.context_length, seed=7)
    seconds = []
    with bench.engine(
        max_batch_size=4,
        tokens_per_block=TOKENS_PER_BLOCK,
        max_tokens_in_paged_kv_cache=pool_tokens,
        kv_cache_host_memory_bytes=host_bytes,
    ) as executor:
        for _ in range(2):
            began = time.perf_counter()
            for prompt in prompts:
                executor.generate([prompt], max_tokens=1, end_ids=())
            seconds.append((time.perf_counter() - began) / NUM_PROMPTS)
        tiers = executor.kv_cache_stats().tiers
    return seconds[1], sum(tier.onboarded_bytes for tier in tiers)


def measure_block_moves(bench: Bench) -> None:
    """One block, and as many as an iteration may evict, beside copies of as many bytes in pinned
    memory."""
    config = bench.config(kv_cache_host_memory_bytes=1 << 28)
    runner = bench.runner(config)
    runner.allocate_kv_cache(1 + MANY_BLOCKS, config.tokens_per_block)
    for num_blocks in (1, MANY_BLOCKS):
        _measure_moves(bench, runner, num_blocks)
    del runner
    free_memory(bench.device)


def _measure_moves(bench: Bench, runner: DeviceRunner, num_blocks: int) -> None:
    block_ids = np.arange(1, 1 + num_blocks, dtype=np.int32)
    contents = runner.read_blocks(block_ids)
    num_bytes = sum(content.nbytes for content in contents)
    on_gpu = bench.device.type == "cuda"
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    moves: tuple[tuple[str, Callable[[], object], Callable[[], object]], ...] = (
        ("offload", lambda: runner.read_blocks(block_ids), lambda: pinned.copy_(on_device)),
        (
            "onboard",
            lambda: runner.write_blocks(block_ids, contents),
            lambda: on_device.copy_(pinned),
        ),
    )
    for what, move, copy in moves:
        gigabytes = num_bytes / 1e9
        emit(
            Row(
                what=f"{bench.name} {what} of {num_blocks} blocks, {num_bytes >> 10} KiB",
                value=gigabytes / _best_seconds(bench.device, move),
                unit="GB/s",
                ceiling=gigabytes / _best_seconds(bench.device, copy),
            )
        )


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """With the host's part; the device has done it all at the end."""
    times = []
    for _ in range(12):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[2:])
