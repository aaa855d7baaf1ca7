"""The simulation decides as the engine's own loop does, iteration by iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvTiersConfig,
    Request,
    RequestPerfMetrics,
    SchedulerConfig,
)
from inflight.api.stats import KvCacheStats
from inflight.engine.engine import Engine
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator import (
    Bandwidth,
    CostModel,
    OpenArrivals,
    Outcome,
    Simulation,
    TierSpeeds,
    TraceRequest,
)
from inflight.simulator.trace import prompt_ids
from inflight.simulator.traffic import Lengths, Traffic
from tests.fakes.clock_runner import ClockRunner

NUM_BLOCKS = 40
HOST_BYTES_PER_SECOND = 16 / 1e-3
"""A block of 16 tokens has a byte for each."""

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


def make_config(policy: CapacitySchedulerPolicy, host_memory_bytes: int = 0) -> ExecutorConfig:
    return ExecutorConfig(
        max_batch_size=12,
        max_num_tokens=64,
        max_seq_len=256,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=KvCacheConfig(
            tokens_per_block=16,
            num_blocks=NUM_BLOCKS,
            tiers=KvTiersConfig(host_memory_bytes=host_memory_bytes),
        ),
    )


class Ran(NamedTuple):
    shapes: list[IterationShape]
    ended: list[RequestPerfMetrics]
    kv: KvCacheStats


def run_engine(trace: list[TraceRequest], config: ExecutorConfig) -> Ran:
    """Requests enter when the clock has passed their arrival, which is all that differs."""
    runner = ClockRunner(COST, seconds_per_block=16 / HOST_BYTES_PER_SECOND)
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
    engine.close()
    return Ran(runner.shapes, ended, engine.kv_cache_stats())


def run_simulation(
    trace: list[TraceRequest], config: ExecutorConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[IterationShape], Outcome]:
    shapes: list[IterationShape] = []
    seconds = CostModel.seconds

    def recorded(cost: CostModel, shape: IterationShape) -> float:
        shapes.append(shape)
        return seconds(cost, shape)

    monkeypatch.setattr(CostModel, "seconds", recorded)
    speeds = TierSpeeds(
        kv_bytes_per_token=1, host=Bandwidth.both(HOST_BYTES_PER_SECOND), disk=Bandwidth.both(1.0)
    )
    simulation = Simulation(config, COST, num_blocks=NUM_BLOCKS, tier_speeds=speeds)
    return shapes, simulation.run(OpenArrivals(trace))


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
    engine_shapes, ended, _ = run_engine(trace, config)
    shapes, outcome = run_simulation(trace, config, monkeypatch)
    assert shapes == engine_shapes
    assert outcome.num_completed == len(ended) == len(trace)
    assert outcome.num_pauses == sum(perf.num_pauses for perf in ended)
    waits = [(perf.first_token_time_ns - perf.arrival_time_ns) / 1e9 for perf in ended]
    assert outcome.time_to_first_token == pytest.approx(np.percentile(waits, (50, 90, 99)))
    lives = [(perf.last_token_time_ns - perf.arrival_time_ns) / 1e9 for perf in ended]
    assert outcome.latency == pytest.approx(np.percentile(lives, (50, 90, 99)))


@pytest.mark.parametrize("host_blocks", [10, 1000])
def test_the_same_iterations_and_moves_with_a_tier_in_host_memory(
    host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = make_trace()
    config = make_config(CapacitySchedulerPolicy.MAX_UTILIZATION, 16 * host_blocks)
    engine = run_engine(trace, config)
    shapes, outcome = run_simulation(trace, config, monkeypatch)
    assert shapes == engine.shapes
    assert outcome.tiers == engine.kv.tiers
    assert outcome.cache_hit_rate == engine.kv.cache_hit_rate
    onboarding = engine.kv.onboarding
    assert onboarding is not None and outcome.onboarding is not None
    assert outcome.onboarding.recompute_decisions == onboarding.recompute_decisions
    assert outcome.onboarding.host_bytes_per_second == pytest.approx(HOST_BYTES_PER_SECOND, rel=0.5)
    (host,) = outcome.tiers
    assert host.offloaded_bytes > host.max_bytes or host_blocks == 1000
    assert outcome.num_onboarded_tokens == {"host": host.onboarded_bytes}
    assert host.onboarded_bytes > 0


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
