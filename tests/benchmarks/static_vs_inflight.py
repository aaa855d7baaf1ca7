"""STATIC_BATCH against in-flight batching on a variable-length load, side by side in one run.

    python tests/benchmarks/static_vs_inflight.py [--repeat 3] [--max-batch-size 16] [--dtype auto]

64 requests arrive at once; 90% generate 8-64 tokens and 10% 256-384. Once with prompts of 16-256
tokens and once with at most 16. STATIC_BATCH keeps the slots of finished rows empty until the whole
batch has drained. Both compute the same contexts, so the ratio has a ceiling: the static time over
what the contexts and the generated tokens would take with every row of every step in use.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SchedulerConfig,
)
from inflight.api.config import InflightConfig
from inflight.api.stats import IterationStats
from inflight.checkpoint import prepare_checkpoint
from inflight.executor import Executor
from inflight.model.factory import load_runner

POLICIES = (CapacitySchedulerPolicy.STATIC_BATCH, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
VOCABULARY = 40_000


@dataclass(frozen=True)
class Outcome:
    seconds: float
    num_tokens: int
    latencies: list[float]
    iterations: list[IterationStats]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.latencies, n=100)[98]


def make_load(longest_prompt: int) -> list[Request]:
    draw = random.Random(11)
    shortest = min(16, longest_prompt) if longest_prompt > 16 else 4
    requests = []
    for place in range(64):
        tokens = draw.randint(256, 384) if place % 10 == 9 else draw.randint(8, 64)
        prompt = tuple(
            draw.randrange(100, VOCABULARY) for _ in range(draw.randint(shortest, longest_prompt))
        )
        requests.append(Request(input_token_ids=prompt, max_tokens=tokens, end_ids=()))
    draw.shuffle(requests)
    return requests


def run(executor: Executor, requests: list[Request]) -> Outcome:
    executor.get_latest_iteration_stats()
    began = time.perf_counter()
    waiting = {executor.enqueue_request(request) for request in requests}
    latencies = []
    while waiting:
        for response in executor.await_responses():
            assert response.error is None, response.error
            waiting.discard(response.request_id)
            latencies.append(time.perf_counter() - began)
    seconds = time.perf_counter() - began
    num_tokens = sum(request.max_tokens for request in requests)
    return Outcome(seconds, num_tokens, latencies, executor.get_latest_iteration_stats())


def ceiling(static: Outcome, batch_size: int) -> float:
    """Static time / (its context time + generated tokens at the rate of its full batches)."""
    context = [s for s in static.iterations if s.inflight_batching_stats.num_context_requests]
    full = [
        s
        for s in static.iterations
        if not s.inflight_batching_stats.num_context_requests
        and s.inflight_batching_stats.num_gen_requests >= 0.9 * batch_size
    ]
    context_seconds = sum(s.iter_latency_ms for s in context) / 1000
    context_tokens = sum(s.num_generated_tokens for s in context)
    rate = sum(s.num_generated_tokens for s in full) / sum(s.iter_latency_ms for s in full) * 1000
    return static.seconds / (context_seconds + (static.num_tokens - context_tokens) / rate)


def compare(directory: Path, arguments: argparse.Namespace, longest_prompt: int) -> None:
    print(f"\n64 requests, prompts of at most {longest_prompt} tokens")
    requests = make_load(longest_prompt)
    executors = {}
    for policy in POLICIES:
        config = ExecutorConfig(
            max_batch_size=arguments.max_batch_size,
            max_seq_len=1024,
            iter_stats_max_iterations=100_000,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
            kv_cache_config=KvCacheConfig(num_blocks=64 * 32, enable_block_reuse=False),
        )
        runner = load_runner(directory, InflightConfig(dtype=arguments.dtype))
        executors[policy] = Executor(runner, config)
        run(executors[policy], requests[:4])
    outcomes: dict[CapacitySchedulerPolicy, list[Outcome]] = {policy: [] for policy in POLICIES}
    for _ in range(arguments.repeat):
        for policy in POLICIES:  # A B A B
            outcomes[policy].append(run(executors[policy], requests))
    for executor in executors.values():
        executor.shutdown()
    for policy, runs in outcomes.items():
        rates = sorted(o.tokens_per_second for o in runs)
        print(
            f"{policy.value:20} {statistics.median(rates):7.1f} tokens/s "
            f"({rates[0]:.1f}-{rates[-1]:.1f}), p99 "
            f"latency {statistics.median(o.p99 for o in runs):.2f} s"
        )
    static, inflight = (outcomes[policy] for policy in POLICIES)
    pairs = list(zip(static, inflight, strict=True))
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in pairs]
    tails = [a.p99 / b.p99 for a, b in pairs]
    top = statistics.median(ceiling(o, arguments.max_batch_size) for o in static)
    print(
        f"in-flight / static: {statistics.median(ratios):.2f}x tokens/s "
        f"({min(ratios):.2f}-{max(ratios):.2f}), ceiling {top:.2f}x; "
        f"p99 latency {statistics.median(tails):.2f}x shorter"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    arguments = parser.parse_args()
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    for longest_prompt in (256, 16):
        compare(directory, arguments, longest_prompt)


if __name__ == "__main__":
    main()
