"""KV tiers of the engine: blocks to and from the host's memory, and prompts that come from there."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from inflight.model.device.runner import DeviceRunner
from tests.gpu.engine_bench import Bench, free_memory
from tests.gpu.rows import Row, emit

NUM_BLOCKS = 16
"""Brought back one after the other, before the device is waited for."""


def measure_tiers(bench: Bench) -> None:
    """Prompts of three times the pool, each asked for twice: what the second answer takes."""
    scale = bench.scale
    per_prompt = -(-(scale.context_length + 1) // 32)
    pool_tokens = 4 * per_prompt * 32
    prompts = bench.prompts(12, scale.context_length, seed=7)
    host_bytes = 4 * pool_tokens * bench.work.kv_bytes_per_token
    seconds = {}
    for host in (0, host_bytes):
        keys = {"max_tokens_in_paged_kv_cache": pool_tokens, "kv_cache_host_memory_bytes": host}
        with bench.engine(max_batch_size=4, **keys) as executor:
            for _ in range(2):
                began = time.perf_counter()
                for prompt in prompts:
                    executor.generate([prompt], max_tokens=1, end_ids=())
                seconds[host] = (time.perf_counter() - began) / len(prompts)
            onboarded = sum(tier.onboarded_bytes for tier in executor.kv_cache_stats().tiers)
    emit(
        Row(
            what=f"{bench.name} prompt of {scale.context_length} tokens again, from host memory",
            value=seconds[0] / seconds[host_bytes],
            unit="times",
            note=f"as fast as computing it; {onboarded >> 20} MiB came back, "
            f"{1000 * seconds[host_bytes]:.1f} ms a prompt",
        )
    )


def measure_block_moves(bench: Bench) -> None:
    """One block at a time, as tiers move them, beside copies of as many bytes in pinned memory."""
    config = bench.config(kv_cache_host_memory_bytes=1 << 28)
    runner = bench.runner(config)
    runner.allocate_kv_cache(NUM_BLOCKS, config.tokens_per_block)
    _measure_moves(bench, runner)
    del runner
    free_memory(bench.device)


def _measure_moves(bench: Bench, runner: DeviceRunner) -> None:
    ids = [np.array([block_id], dtype=np.int32) for block_id in range(NUM_BLOCKS)]
    contents = runner.read_blocks(ids[0])
    block_bytes, on_gpu = contents.nbytes, bench.device.type == "cuda"
    pinned = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    on_device = torch.empty(block_bytes, dtype=torch.uint8, device=bench.device)

    def onboard() -> None:
        for block_id in ids:
            runner.write_blocks(block_id, contents)

    def copy_in() -> None:
        for _ in ids:
            on_device.copy_(pinned, non_blocking=True)

    def copy_out() -> None:
        pinned.copy_(on_device, non_blocking=True)

    for what, count, move, copy in (
        ("offload", 1, lambda: runner.read_blocks(ids[0]), copy_out),
        ("onboard", NUM_BLOCKS, onboard, copy_in),
    ):
        gigabytes = count * block_bytes / 1e9
        emit(
            Row(
                what=f"{bench.name} {what} of blocks of {block_bytes >> 10} KiB",
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
