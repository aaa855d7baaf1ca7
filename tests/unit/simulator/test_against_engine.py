"""The simulation decides as the engine's own loop does, iteration by iteration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    RequestPerfMetrics,
    SchedulerConfig,
)
from inflight.engine.engine import Engine
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator import CostModel, OpenArrivals, Simulation, TraceRequest
from inflight.simulator.trace import prompt_ids
from inflight.simulator.traffic import Lengths, Traffic
from tests.fakes.clock_runner import ClockRunner

NUM_BLOCKS = 40
COST = CostModel(
    base_seconds=0.01,
    context_token_seconds=1e-3,
    generation_row_seconds=2e-3,
    context_pair_seconds=1e-6,
    generation_pair_seconds=1e-6,
)


def make_trace() -> list[TraceRequest]:
    traffic = Traffic(
        input_lengths=Lengths.parse("input", "p50=40,p95=150"),
        output_lengths=Lengths.parse("output", "p50=60,p95=150"),
        requests_per_second=6.0,
        shared_prefix=32,
        num_groups=2,
    )
    return traffic.trace(120, seed=5, max_seq_len=256)


def make_config(policy: CapacitySchedulerPolicy) -> ExecutorConfig:
    return ExecutorConfig(
        max_batch_size=12,
        max_num_tokens=64,
        max_seq_len=256,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=KvCacheConfig(tokens_per_block=16, num_blocks=NUM_BLOCKS),
    )


def run_engine(
    trace: list[TraceRequest], config: ExecutorConfig
) -> tuple[list[IterationShape], list[RequestPerfMetrics]]:
    """Requests enter when the clock has passed their arrival, which is all that differs."""
    runner = ClockRunner(COST)
    engine = Engine(runner, config, clock=lambda: runner.now)
    pending = list(enumerate(trace, start=1))
    ended = []
    while pending or engine.loop.has_work:
        if not engine.loop.has_work:
            runner.now = max(runner.now, pending[0][1].arrival)
        now = runner.now
        while pending and pending[0][1].arrival <= now:
            number, traced = pending.pop(0)
            runner.now = traced.arrival  # what the engine takes for the time of arrival
            request = Request(
                input_token_ids=prompt_ids(traced, number),
                max_tokens=traced.output_length,
                end_ids=(),
            )
            engine.enqueue(number, request)
        runner.now = now
        engine.loop.step()
        for response in engine.outbox.take(None, 0):
            assert response.result is not None
            if response.result.perf_metrics is not None:
                ended.append(response.result.perf_metrics)
    return runner.shapes, ended


@pytest.mark.parametrize(
    "policy",
    [
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        CapacitySchedulerPolicy.MAX_UTILIZATION,
        CapacitySchedulerPolicy.STATIC_BATCH,
    ],
)
def test_the_same_iterations_times_and_pauses_as_the_engines_loop(
    policy: CapacitySchedulerPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, config = make_trace(), make_config(policy)
    engine_shapes, ended = run_engine(trace, config)
    shapes: list[IterationShape] = []
    seconds = CostModel.seconds

    def recorded(cost: CostModel, shape: IterationShape) -> float:
        shapes.append(shape)
        return seconds(cost, shape)

    monkeypatch.setattr(CostModel, "seconds", recorded)
    simulation = Simulation(config, COST, num_blocks=NUM_BLOCKS)
    outcome = simulation.run(OpenArrivals(trace))

    assert shapes == engine_shapes
    assert outcome.num_completed == len(ended) == len(trace)
    assert outcome.num_pauses == sum(perf.num_pauses for perf in ended)
    waits = [(perf.first_token_time_ns - perf.arrival_time_ns) / 1e9 for perf in ended]
    assert outcome.time_to_first_token == pytest.approx(np.percentile(waits, (50, 90, 99)))
    lives = [(perf.last_token_time_ns - perf.arrival_time_ns) / 1e9 for perf in ended]
    assert outcome.latency == pytest.approx(np.percentile(lives, (50, 90, 99)))


def test_the_trace_makes_the_policies_differ() -> None:
    """Else the comparison above would show little."""
    outcomes = [
        Simulation(make_config(policy), COST, num_blocks=NUM_BLOCKS).run(OpenArrivals(make_trace()))
        for policy in (
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            CapacitySchedulerPolicy.MAX_UTILIZATION,
        )
    ]
    assert outcomes[1].num_pauses > 0
    assert replace(outcomes[0], wall_seconds=0) != replace(outcomes[1], wall_seconds=0)
    assert all(outcome.num_reused_tokens > 0 for outcome in outcomes)
