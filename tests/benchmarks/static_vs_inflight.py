"""In-flight batching against static batches on a variable-length load, side by side in one run.

    python -m tests.benchmarks.static_vs_inflight [--load W3] [--padded 1] [--repeat 3]

The loads are W3 of ``compare/workloads.py``, all 64 requests at once, and "W3short", the same with
the first 16 tokens of each prompt. Three systems take turns:

- in-flight: GUARANTEED_NO_EVICT, a slot that is free takes the next request.
- static: STATIC_BATCH on the same engine, which packs its rows but keeps the slots of finished
  ones empty until the whole batch has drained.
- padded: transformers' ``generate`` on left-padded batches in the order of arrival. It needs
  minutes, so it takes part in the first ``--padded`` repeats only. ``--requests 32`` halves that,
  and in-flight then gains less: the last long requests, which run alone, are more of the load.

Only tokens that were asked for count, not what a padded row computes beyond. A request's latency is
the time until its answer is whole, in a padded batch until the batch is. In-flight and static
compute the same contexts, so their ratio has a ceiling: the static time over what the contexts and
the generated tokens would take with every row of every step in use.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

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
from inflight.model.dtypes import choose_dtype
from inflight.model.factory import load_runner
from tests.benchmarks.compare.report import describe_ratio
from tests.benchmarks.compare.workloads import make_workload
from tests.benchmarks.padded_batch import PaddedBatch

PADDED, STATIC, INFLIGHT = "padded", "static", "in-flight"
POLICIES = {
    STATIC: CapacitySchedulerPolicy.STATIC_BATCH,
    INFLIGHT: CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
}
LONGEST_PROMPT = {"W3": None, "W3short": 16}
"""By load; None: as the workload has them."""


@dataclass(frozen=True)
class Outcome:
    seconds: float
    num_tokens: int
    latencies: list[float]
    iterations: list[IterationStats] = field(default_factory=list)
    """Of the engine; none of a padded batch."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.latencies, n=100, method="inclusive")[98]


Serve = Callable[[Sequence[Request]], Outcome]


def make_load(name: str) -> list[Request]:
    """``name``: a key of LONGEST_PROMPT."""
    return [
        Request(
            input_token_ids=job.prompt[: LONGEST_PROMPT[name]],
            max_tokens=job.max_tokens,
            end_ids=(),
        )
        for job in make_workload("W3", 0).jobs
    ]


def num_tokens_of(requests: Sequence[Request]) -> int:
    return sum(request.max_tokens for request in requests)


def serve_by_engine(executor: Executor, requests: Sequence[Request]) -> Outcome:
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
    iterations = executor.get_latest_iteration_stats()
    return Outcome(seconds, num_tokens_of(requests), latencies, iterations)


def serve_padded(padded: PaddedBatch, batch_size: int, requests: Sequence[Request]) -> Outcome:
    began = time.perf_counter()
    latencies: list[float] = []
    for answers in padded.serve(requests, batch_size):
        latencies += [time.perf_counter() - began] * len(answers)
    return Outcome(time.perf_counter() - began, num_tokens_of(requests), latencies)


def ceiling(static: Outcome) -> float:
    """Static time / (its context time + generated tokens at the rate of its fullest iterations)."""
    context = [s for s in static.iterations if s.inflight_batching_stats.num_context_requests]
    generation = [
        s for s in static.iterations if not s.inflight_batching_stats.num_context_requests
    ]
    most = max(s.inflight_batching_stats.num_gen_requests for s in generation)
    full = [s for s in generation if s.inflight_batching_stats.num_gen_requests >= 0.9 * most]
    context_seconds = sum(s.iter_latency_ms for s in context) / 1000
    context_tokens = sum(s.num_generated_tokens for s in context)
    rate = sum(s.num_generated_tokens for s in full) / sum(s.iter_latency_ms for s in full) * 1000
    return static.seconds / (context_seconds + (static.num_tokens - context_tokens) / rate)


def make_executors(directory: Path, arguments: argparse.Namespace) -> dict[str, Executor]:
    return {
        name: Executor(
            load_runner(directory, InflightConfig(dtype=arguments.dtype)),
            ExecutorConfig(
                max_batch_size=arguments.max_batch_size,
                max_seq_len=1024,
                iter_stats_max_iterations=100_000,
                scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
                kv_cache_config=KvCacheConfig(num_blocks=64 * 32, enable_block_reuse=False),
            ),
        )
        for name, policy in POLICIES.items()
    }


def compare(systems: Mapping[str, Serve], load: str, arguments: argparse.Namespace) -> None:
    whole = make_load(load)
    requests = whole[: arguments.requests]
    title = f"{load}, {len(requests)} of {len(whole)} requests"
    outcomes: dict[str, list[Outcome]] = {name: [] for name in systems}
    for serve in systems.values():
        serve(requests[:2])  # warms up
    for repeat in range(arguments.repeat):
        for name, serve in systems.items():  # A B C A B C
            if name == PADDED and repeat >= arguments.padded:
                continue
            outcomes[name].append(serve(requests))
            seconds = outcomes[name][-1].seconds
            print(f"{title} {repeat + 1}/{arguments.repeat} {name}: {seconds:.1f} s", flush=True)
    print("\n| load | system | tokens/s (range) | p99 latency | in-flight is (range) |")
    print("|---|---|---|---|---|")
    for name, runs in outcomes.items():
        print(f"| {title} | {name} | " + " | ".join(cells(runs, outcomes[INFLIGHT])) + " |")
    tops = [ceiling(o) for o in outcomes[STATIC]]
    print(f"\nceiling of in-flight over static: {statistics.median(tops):.2f}x")


def cells(runs: Sequence[Outcome], inflight: Sequence[Outcome]) -> list[str]:
    """Of a system's row. Ratios pair the runs of the same repeat."""
    rates = sorted(o.tokens_per_second for o in runs)
    pairs = zip(runs, inflight, strict=False)
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in pairs]
    return [
        f"{statistics.median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})",
        f"{statistics.median(o.p99 for o in runs):.1f} s",
        "" if runs is inflight else describe_ratio(ratios),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--load", choices=[*LONGEST_PROMPT, "all"], default="all")
    add("--repeat", type=int, default=3)
    add("--padded", type=int, default=0, help="repeats in which the padded batch takes part")
    add("--requests", type=int, help="of each load the first ones; all unless said")
    add("--max-batch-size", type=int, default=16, help="of all systems")
    add("--dtype", default="auto", help="the padded batch: that of the activations; auto: torch's")
    add("--model", default="", help="checkpoint folder; empty: the embedded model")
    arguments = parser.parse_args()
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    executors = make_executors(directory, arguments)
    systems: dict[str, Serve] = {}
    if arguments.padded:
        dtype = choose_dtype(arguments.dtype, torch.device("cpu"))
        padded = PaddedBatch(directory, dtype)
        systems[PADDED] = partial(serve_padded, padded, arguments.max_batch_size)
        print(f"{PADDED}: transformers, {dtype}, {torch.get_num_threads()} threads")
    for name, executor in executors.items():
        systems[name] = partial(serve_by_engine, executor)
    for load in LONGEST_PROMPT if arguments.load == "all" else [arguments.load]:
        compare(systems, load, arguments)
    for executor in executors.values():
        executor.shutdown()


if __name__ == "__main__":
    main()
