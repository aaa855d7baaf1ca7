"""Speed and waste by tokens_per_block, side by side in one run.

    python -m tests.benchmarks.block_sizes [--repeat 3] [--dtype bf16] [--sizes 16,32,64,128]

Serves workload W3 of tests/benchmarks/compare (64 requests, prompts of 16-512 tokens, 16 in flight)
with one executor for each size, in turn. "Waste" is the share of the KV slots of taken blocks that
hold no token, over all iterations;
Small blocks waste less and share shorter prefixes; large ones are read in longer runs and counted
in fewer pieces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from inflight.api import ExecutorConfig, KvCacheConfig, Request
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.checkpoint import prepare_checkpoint
from tests.benchmarks.compare.workloads import Workload, make_workload

set_thread_defaults()
from inflight.executor import Executor  # noqa: E402 - imports torch, after the defaults
from inflight.model.factory import load_runner  # noqa: E402

MAX_SEQ_LEN = 1024
KV_TOKENS = 16 * MAX_SEQ_LEN


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)


def load(directory: Path, dtype: str, tokens_per_block: int, concurrency: int) -> Executor:
    config = ExecutorConfig(
        max_batch_size=concurrency,
        max_seq_len=MAX_SEQ_LEN,
        iter_stats_max_iterations=100_000,
        request_stats_max_iterations=100_000,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=tokens_per_block,
            num_blocks=KV_TOKENS // tokens_per_block,
            enable_block_reuse=False,
        ),
    )
    runner = load_runner(
        directory, InflightConfig.load(environment={}, parameters={"dtype": dtype})
    )
    return Executor(runner, config)


def serve(executor: Executor, workload: Workload) -> float:
    """Seconds until the last request has ended."""
    began = time.perf_counter()
    running = {
        executor.enqueue_request(
            Request(input_token_ids=job.prompt, max_tokens=job.max_tokens, end_ids=())
        )
        for job in workload.jobs
    }
    while running:
        for response in executor.await_responses():
            assert response.error is None, response.error
            running.discard(response.request_id)
    return time.perf_counter() - began


def waste_since_last_call(executor: Executor, tokens_per_block: int) -> float:
    """1 - tokens held / slots of the blocks that hold them, summed over the iterations."""
    tokens = slots = 0
    iterations = executor.get_latest_iteration_stats()
    requests = executor.get_latest_request_stats()
    for iteration, held in zip(iterations, requests, strict=True):
        blocks = iteration.kv_cache_stats.used_num_blocks
        if not blocks:
            continue
        slots += blocks * tokens_per_block
        for request in held.request_stats:
            # The newest token has no KV yet: it is computed in the next iteration.
            generated = max(0, request.num_generated_tokens - 1)
            tokens += request.context_prefill_position + generated
    return 1 - tokens / slots


def compare(directory: Path, dtype: str, sizes: list[int], repeat: int) -> dict[int, Measured]:
    first = make_workload("W3", 0)
    executors = {size: load(directory, dtype, size, first.concurrency) for size in sizes}
    for executor in executors.values():
        serve(executor, make_workload("W2c8", 99))
        executor.get_latest_iteration_stats(), executor.get_latest_request_stats()
    measured = {size: Measured() for size in sizes}
    for salt in range(repeat):
        workload = make_workload("W3", salt)
        for size, executor in executors.items():  # A B C D A B C D
            measured[size].seconds.append(serve(executor, workload))
            measured[size].waste.append(waste_since_last_call(executor, size))
    for executor in executors.values():
        executor.shutdown()
    return measured


def print_table(measured: dict[int, Measured], num_tokens: int) -> None:
    print(f"{'tokens_per_block':>16}{'tokens/s':>10}{'range':>16}{'waste':>8}")
    for size, one in measured.items():
        rates = sorted(num_tokens / seconds for seconds in one.seconds)
        print(
            f"{size:>16}{statistics.median(rates):>10.1f}{f'{rates[0]:.1f}-{rates[-1]:.1f}':>16}"
            f"{statistics.median(one.waste):>8.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--sizes", default="16,32,64,128")
    asked = parser.parse_args()
    directory = prepare_checkpoint("", "", progress=print).directory
    sizes = [int(size) for size in asked.sizes.split(",")]
    measured = compare(directory, asked.dtype, sizes, asked.repeat)
    print_table(measured, make_workload("W3", 0).num_output_tokens)


if __name__ == "__main__":
    main()
