"""Small traces by hand, and what holds for every trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from inflight.api import CapacitySchedulerPolicy, ExecutorConfig, KvCacheConfig, SchedulerConfig
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator import ClosedArrivals, CostModel, OpenArrivals, Outcome, Simulation
from inflight.simulator.trace import PrefixPiece, TraceRequest
from inflight.simulator.traffic import Lengths, Traffic

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION

COST = CostModel(
    base_seconds=1.0,
    context_token_seconds=0.1,
    generation_row_seconds=0.01,
    context_pair_seconds=0.0,
    generation_pair_seconds=0.0,
)


def make_config(policy: CapacitySchedulerPolicy = NO_EVICT, **kv: object) -> ExecutorConfig:
    return ExecutorConfig(
        max_batch_size=4,
        max_num_tokens=20,
        max_seq_len=64,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=KvCacheConfig(tokens_per_block=4, **kv),  # type: ignore[arg-type]
    )


def run(
    trace: Iterable[TraceRequest],
    config: ExecutorConfig | None = None,
    *,
    num_blocks: int = 100,
) -> Outcome:
    simulation = Simulation(config or make_config(), COST, num_blocks=num_blocks)
    return simulation.run(OpenArrivals(list(trace)))


def test_one_request() -> None:
    """10 context tokens, then two generations of a row each."""
    outcome = run([TraceRequest(5.0, 10, 3)])
    assert outcome.num_iterations == 3
    assert outcome.time_to_first_token == pytest.approx((2.0, 2.0, 2.0))
    assert outcome.inter_token == pytest.approx((1.01, 1.01, 1.01))
    assert outcome.latency.p50 == pytest.approx(4.02)
    assert outcome.simulated_seconds == pytest.approx(5 + 4.02)
    assert (outcome.num_context_tokens, outcome.num_generated_tokens) == (10, 3)
    # 10, 11 and 12 tokens in 3 blocks of 4, in iterations of 2, 1.01 and 1.01 seconds.
    assert outcome.kv_use == pytest.approx(3 / 100)
    assert outcome.batch_fill == pytest.approx(1 / 4)
    assert outcome.token_fill == pytest.approx((10 * 2.0 + 2 * 1.01) / 4.02 / 20)
    assert outcome.waste == pytest.approx(2 / 12)  # looked at after the first iteration


def test_a_long_context_is_cut_and_a_second_request_joins_it() -> None:
    """30 tokens take 20 and 10; the second request's 6 fit beside the 10. Both then generate."""
    outcome = run([TraceRequest(0.0, 30, 2), TraceRequest(0.5, 6, 2)])
    # Iterations of 1 + 2.0, 1 + 1.6 and 1 + 0.02 seconds.
    assert outcome.num_iterations == 3
    assert outcome.simulated_seconds == pytest.approx(3.0 + 2.6 + 1.02)
    # The first waits 5.6 for its first token, the second 5.1.
    assert outcome.time_to_first_token.p50 == pytest.approx((5.6 + 5.1) / 2)
    assert outcome.inter_token.p99 == pytest.approx(1.02)
    assert outcome.bound_by["max_num_tokens"] == pytest.approx(3.0 / 6.62)


def test_the_clock_jumps_over_idle_time() -> None:
    outcome = run([TraceRequest(0.0, 10, 1), TraceRequest(1000.0, 10, 1)])
    assert outcome.simulated_seconds == pytest.approx(1002.0)
    assert outcome.time_to_first_token.p99 == pytest.approx(2.0)
    assert outcome.batch_fill == pytest.approx(1 / 4)


def test_a_prefix_is_computed_once() -> None:
    prefix = (PrefixPiece("system", 8),)
    trace = [TraceRequest(0.0, 10, 1, prefix), TraceRequest(10.0, 10, 1, prefix)]
    shared, alone = run(trace), run(trace, make_config(enable_block_reuse=False))
    assert (shared.num_reused_tokens, shared.num_context_tokens) == (8, 12)
    assert (alone.num_reused_tokens, alone.num_context_tokens) == (0, 20)
    assert shared.latency.p50 == pytest.approx((2.0 + 1.2) / 2)


def test_no_evict_waits_where_max_utilization_starts() -> None:
    """Each may need 4 + 20 tokens, 6 of 8 blocks: only one at once, or both from the start."""
    trace = [TraceRequest(0.0, 4, 20), TraceRequest(0.0, 4, 20)]
    one = run(trace, make_config(NO_EVICT), num_blocks=8)
    assert one.num_iterations == 2 * 20
    assert one.bound_by["kv_cache"] == pytest.approx(0.5)
    both = run(trace, make_config(UTILIZATION), num_blocks=12)
    assert both.num_iterations == 20
    assert both.bound_by["kv_cache"] == 0


def test_max_utilization_pauses_and_everyone_still_ends() -> None:
    trace = [TraceRequest(0.0, 4, 60), TraceRequest(0.0, 4, 60)]
    outcome = run(trace, make_config(UTILIZATION), num_blocks=20)
    assert outcome.num_pauses == outcome.num_paused_requests == 1
    assert outcome.num_generated_tokens == 120
    assert outcome.peak_kv_use == 1.0
    # What the paused one had is a context again, but for what survived in the cache.
    assert outcome.num_context_tokens + outcome.num_reused_tokens > 8


def test_requests_beyond_a_limit_are_refused_as_the_engine_refuses_them() -> None:
    trace = [TraceRequest(0.0, 70, 1), TraceRequest(0.0, 10, 60), TraceRequest(1.0, 10, 1)]
    outcome = run(trace)
    assert (outcome.num_completed, outcome.num_refused) == (1, 2)
    assert "max_seq_len is 64" in outcome.first_refusal
    nobody = run(trace[:1])
    assert (nobody.num_completed, nobody.num_iterations, nobody.batch_fill) == (0, 0, 0.0)


def test_closed_arrivals_keep_so_many_in_the_engine() -> None:
    """Two clients: the second pair of requests comes when the first has ended."""
    trace = [TraceRequest(0.0, 10, 1)] * 4
    outcome = Simulation(make_config(), COST, num_blocks=100).run(ClosedArrivals(trace, 2))
    assert outcome.num_iterations == 2
    assert outcome.latency == pytest.approx((3.0, 3.0, 3.0))
    assert outcome.mean_waiting == 0


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
@pytest.mark.parametrize("seed", range(4))
def test_all_tokens_are_computed_and_every_block_comes_back(
    policy: CapacitySchedulerPolicy, seed: int
) -> None:
    """``run`` itself checks the books and that no block is held at the end."""
    traffic = Traffic(
        input_lengths=Lengths.parse("", "p50=12,p95=30"),
        output_lengths=Lengths.parse("", "p50=8,p95=30"),
        requests_per_second=0.5,
        shared_prefix=8,
        num_groups=2,
    )
    trace = traffic.trace(60, seed=seed, max_seq_len=64)
    outcome = run(trace, make_config(policy), num_blocks=20)
    assert outcome.num_completed == 60
    assert outcome.num_generated_tokens == sum(r.output_length for r in trace)
    computed = outcome.num_context_tokens + outcome.num_reused_tokens
    needed = sum(r.input_length for r in trace)
    assert computed == needed if outcome.num_pauses == 0 else computed > needed
    assert 0 < outcome.batch_fill <= 1 and 0 < outcome.token_fill <= 1
    assert 0 < outcome.kv_use <= outcome.peak_kv_use <= 1 and 0 <= outcome.waste < 1
    assert sum(outcome.bound_by.values()) == pytest.approx(1)
    again = run(trace, make_config(policy), num_blocks=20)
    assert replace(again, wall_seconds=0) == replace(outcome, wall_seconds=0)


def test_the_timeline_stays_bounded_and_in_order() -> None:
    outcome = run([TraceRequest(0.0, 1, 60)] * 120)
    assert 500 < len(outcome.timeline) <= 2049
    seconds = [moment.seconds for moment in outcome.timeline]
    assert seconds == sorted(seconds)


def test_the_cost_of_a_shape() -> None:
    cost = CostModel(
        base_seconds=1.0,
        context_token_seconds=0.5,
        generation_row_seconds=0.25,
        context_pair_seconds=0.01,
        generation_pair_seconds=0.001,
        weight_read_seconds=3.0,
    )
    assert cost.seconds(IterationShape(2, 10, 4, 100)) == pytest.approx(1 + 3 + 0.1 + 0.1)
    assert cost.seconds(IterationShape(8, 10, 4, 100)) == pytest.approx(1 + 5 + 0.1 + 0.1)
