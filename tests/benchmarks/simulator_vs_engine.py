"""Prediction against measurement: python tests/benchmarks/simulator_vs_engine.py

Measures the engine's cost model on this machine, simulates a load with it, then sends the same load
through the real Executor, request by request at its time of arrival. Both are printed with how far
the prediction is off; so is the prediction from a cost model that is measured after the run. The
load has random lengths, a shared prefix and random arrivals at a share of what the simulation says
the machine can serve. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from inflight.api import ExecutorConfig, Request
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.api.response import RequestPerfMetrics
from inflight.checkpoint import prepare_checkpoint
from inflight.cli.calibration import measure
from inflight.executor.executor import Executor
from inflight.model.factory import load_runner
from inflight.model.sampling import load_sampling_kernels
from inflight.simulator import CostModel, OpenArrivals, Simulation, TraceRequest
from inflight.simulator.trace import prompt_ids
from inflight.simulator.traffic import Lengths, Traffic

MAX_SEQ_LEN, NUM_BLOCKS = 1024, 512

Figures = dict[str, float]


def make_trace(num_requests: int, requests_per_second: float) -> list[TraceRequest]:
    traffic = Traffic(
        input_lengths=Lengths.parse("input lengths", "p50=120,p95=500"),
        output_lengths=Lengths.parse("output lengths", "p50=40,p95=150"),
        requests_per_second=requests_per_second,
        shared_prefix=64,
        num_groups=2,
    )
    return traffic.trace(num_requests, seed=1, max_seq_len=MAX_SEQ_LEN)


def predict(trace: Sequence[TraceRequest], limits: ExecutorConfig, cost: CostModel) -> Figures:
    outcome = Simulation(limits, cost, num_blocks=NUM_BLOCKS).run(OpenArrivals(trace))
    return {
        "TTFT p50, s": outcome.time_to_first_token.p50,
        "TTFT p99, s": outcome.time_to_first_token.p99,
        "answer p50, s": outcome.latency.p50,
        "answer p99, s": outcome.latency.p99,
        "generated tokens/s": outcome.tokens_per_second,
        "requests/s": outcome.num_completed / outcome.simulated_seconds,
    }


def run_engine(
    trace: Sequence[TraceRequest], executor: Executor, vocab_size: int
) -> list[RequestPerfMetrics]:
    """Sends each request when its time has come; waits for the last to end."""
    requests = [
        Request(
            input_token_ids=tuple(each % vocab_size for each in prompt_ids(traced, number)),
            max_tokens=traced.output_length,
            end_ids=(),
        )
        for number, traced in enumerate(trace)
    ]
    began = time.monotonic()
    for traced, request in zip(trace, requests, strict=True):
        time.sleep(max(0.0, began + traced.arrival - time.monotonic()))
        executor.enqueue_request(request)
    ended: list[RequestPerfMetrics] = []
    while len(ended) < len(trace):
        for response in executor.await_responses(timeout=600):
            if response.result is None or response.result.perf_metrics is None:
                raise SystemExit(f"a request failed: {response.error}")
            ended.append(response.result.perf_metrics)
    return ended


def measured(ended: Sequence[RequestPerfMetrics], num_generated: int) -> Figures:
    first = np.array([p.first_token_time_ns - p.arrival_time_ns for p in ended]) / 1e9
    whole = np.array([p.last_token_time_ns - p.arrival_time_ns for p in ended]) / 1e9
    span = max(p.last_token_time_ns for p in ended) - min(p.arrival_time_ns for p in ended)
    return {
        "TTFT p50, s": float(np.percentile(first, 50)),
        "TTFT p99, s": float(np.percentile(first, 99)),
        "answer p50, s": float(np.percentile(whole, 50)),
        "answer p99, s": float(np.percentile(whole, 99)),
        "generated tokens/s": num_generated / (span / 1e9),
        "requests/s": len(ended) / (span / 1e9),
    }


def compare(directory: Path, config: InflightConfig, num_requests: int, share: float) -> None:
    limits = config.executor_config(max_seq_len=MAX_SEQ_LEN)
    limits = replace(limits, kv_cache_config=replace(limits.kv_cache_config, num_blocks=NUM_BLOCKS))
    before = measure(load_runner(directory, config), limits).cost
    most = predict(make_trace(num_requests, float("inf")), limits, before)["requests/s"]
    trace = make_trace(num_requests, share * most)
    print(f"{num_requests} requests, {share * most:.2f} a second ({share:.0%} of {most:.2f})")
    runner = load_runner(directory, config)
    kernels = load_sampling_kernels(config.cache_dir)
    with Executor(runner, limits, sampling_kernels=kernels) as executor:
        run_engine(make_trace(4, float("inf")), executor, runner.spec.vocab_size)  # warm
        ended = run_engine(trace, executor, runner.spec.vocab_size)
    seen = measured(ended, sum(traced.output_length for traced in trace))
    after = measure(load_runner(directory, config), limits).cost
    print_table(seen, predict(trace, limits, before), predict(trace, limits, after))
    print(f"cost before: {before}\ncost after: {after}")


def print_table(seen: Figures, before: Figures, after: Figures) -> None:
    """Two predictions that differ much are a machine that did something else meanwhile."""
    print(f"{'':20}{'measured':>10}{'predicted':>11}{'off by':>8}{'cost model of after':>24}")
    for name, value in seen.items():
        print(
            f"{name:20}{value:10.3f}{before[name]:11.3f}{before[name] / value - 1:8.0%}"
            f"{after[name]:16.3f}{after[name] / value - 1:8.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prediction and measurement side by side.")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--load", type=float, default=0.7, help="share of what can be served")
    arguments = parser.parse_args()
    set_thread_defaults()
    directory = prepare_checkpoint(arguments.model, arguments.cache_dir, progress=print).directory
    config = InflightConfig(
        dtype=arguments.dtype, cache_dir=arguments.cache_dir, max_seq_len=MAX_SEQ_LEN
    )
    compare(directory, config, arguments.requests, arguments.load)


if __name__ == "__main__":
    main()
