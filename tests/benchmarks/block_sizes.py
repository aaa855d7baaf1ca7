"""Speed and waste by tokens_per_block, side by side in one run.

    python -m tests.benchmarks.block_sizes [--repeat 3] [--dtype bf16] [--sizes 16,32,64,128]

Serves workload W3 of tests/benchmarks/compare (64 requests, prompts of 16-512 tokens, 16 in flight)
with one executor for each size, in turn. "Filled" is the share of the KV slots of taken blocks that
hold a token, over all iterations. Beside it what a cache without blocks would fill, which reserves
at a request's start the slots of max_seq_len, or of its prompt and max_tokens.

Small blocks waste less and share shorter prefixes; large ones are read in longer runs and counted
in fewer pieces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from inflight.api import ExecutorConfig, KvCacheConfig, Request
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.api.stats import KvCacheStats, RequestStatsPerIteration
from inflight.checkpoint import prepare_checkpoint
from tests.benchmarks.compare.workloads import Workload, make_workload

set_thread_defaults()
from inflight.executor import Executor  # noqa: E402 - imports torch, after the defaults
from inflight.model.factory import load_runner  # noqa: E402

MAX_SEQ_LEN = 1024
KV_TOKENS = 16 * MAX_SEQ_LEN


@dataclass
class Filled:
    """Tokens that were held, and slots for them, summed over iterations."""

    tokens: int = 0
    of_blocks: int = 0
    of_max_seq_len: int = 0
    of_max_tokens: int = 0
    """Of the prompt and all tokens that may be generated."""

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of each kind of slots: blocks, max_tokens, max_seq_len."""
        tokens = self.tokens
        return tokens / self.of_blocks, tokens / self.of_max_tokens, tokens / self.of_max_seq_len


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    filled: Filled = field(default_factory=Filled)


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


def serve(executor: Executor, workload: Workload, measured: Measured) -> None:
    """Until the last request has ended."""
    began = time.perf_counter()
    longest = {
        executor.enqueue_request(
            Request(input_token_ids=job.prompt, max_tokens=job.max_tokens, end_ids=())
        ): len(job.prompt) + job.max_tokens
        for job in workload.jobs
    }
    running = set(longest)
    while running:
        for response in executor.await_responses():
            assert response.error is None, response.error
            running.discard(response.request_id)
    measured.seconds.append(time.perf_counter() - began)
    kv_stats = {each.iter: each.kv_cache_stats for each in executor.get_latest_iteration_stats()}
    requests = executor.get_latest_request_stats()
    for now, after in pairwise(requests):
        if now.iter in kv_stats:
            add_slots(measured.filled, kv_stats[now.iter], held_tokens(now, after), longest)


def held_tokens(now: RequestStatsPerIteration, after: RequestStatsPerIteration) -> dict[int, int]:
    """Tokens by request. Statistics are of the moment when the blocks of the next iteration are
    taken and it is being computed, so what that writes is in them; it is seen ``after``."""
    # The newest token has no KV yet: it is computed in the iteration after.
    written = {
        request.id: request.context_prefill_position + max(0, request.num_generated_tokens - 1)
        for request in after.request_stats
    }
    held = {
        request.id: written.get(
            request.id, request.context_prefill_position + request.num_generated_tokens
        )
        for request in now.request_stats
    }
    return {request_id: number for request_id, number in held.items() if number}


def add_slots(
    filled: Filled, kv: KvCacheStats, held: dict[int, int], longest: dict[int, int]
) -> None:
    """``held``: tokens by request; ``longest``: its prompt and max_tokens."""
    filled.tokens += sum(held.values())
    filled.of_blocks += kv.used_num_blocks * kv.tokens_per_block
    filled.of_max_tokens += sum(longest[request_id] for request_id in held)
    filled.of_max_seq_len += MAX_SEQ_LEN * len(held)


def compare(directory: Path, dtype: str, sizes: list[int], repeat: int) -> dict[int, Measured]:
    first = make_workload("W3", 0)
    executors = {size: load(directory, dtype, size, first.concurrency) for size in sizes}
    for executor in executors.values():
        serve(executor, make_workload("W2c8", 99), Measured())
    measured = {size: Measured() for size in sizes}
    for salt in range(repeat):
        workload = make_workload("W3", salt)
        for size, executor in executors.items():  # A B C D A B C D
            serve(executor, workload, measured[size])
    for executor in executors.values():
        executor.shutdown()
    return measured


def print_table(measured: dict[int, Measured], num_tokens: int) -> None:
    print(
        f"{'tokens_per_block':>16}{'tokens/s':>10}{'range':>16}{'filled':>8}{'waste':>8}"
        f"{'reserving max_tokens':>22}{'max_seq_len':>13}"
    )
    for size, one in measured.items():
        rates = sorted(num_tokens / seconds for seconds in one.seconds)
        filled, of_max_tokens, of_max_seq_len = one.filled.shares
        print(
            f"{size:>16}{statistics.median(rates):>10.1f}{f'{rates[0]:.1f}-{rates[-1]:.1f}':>16}"
            f"{filled:>8.1%}{1 - filled:>8.1%}{of_max_tokens:>22.1%}{of_max_seq_len:>13.1%}"
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
