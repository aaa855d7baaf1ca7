"""Random loads on a scheduler: what every plan keeps to, and that everybody finishes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api import CapacitySchedulerPolicy as Policy
from inflight.api import ContextChunkingPolicy, FinishReason
from inflight.batch import LlmRequest, RequestState, ScheduledBatch
from tests.fakes.fake_capacity import FakeCapacity
from tests.fakes.fake_window_pool import FakeWindowPool
from tests.unit.scheduler.simulated_engine import (
    SimulatedEngine,
    make_request,
    make_scheduler,
)


@dataclass(frozen=True)
class Load:
    """Requests that arrive while an engine of some size runs; some are cancelled."""

    policy: Policy
    chunking: ContextChunkingPolicy | None
    tokens_per_block: int
    num_blocks: int
    max_batch_size: int
    max_num_tokens: int
    reuse: bool
    windows: list[tuple[int, int]]
    """Of further pools: window, and blocks beyond the fewest that will do."""
    arrivals: dict[int, list[LlmRequest]]
    """By iteration."""
    cancellations: dict[int, int]
    """Request id by iteration."""

    @property
    def requests(self) -> list[LlmRequest]:
        return [request for group in self.arrivals.values() for request in group]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Loads in which every request fits the pool alone, and prompts share prefixes."""
    arrivals: dict[int, list[LlmRequest]] = {}
    num_requests = draw(st.integers(1, 12))
    for request_id in range(num_requests):
        iteration = draw(st.integers(0, 15))
        request = make_request(
            request_id,
            [0] * draw(st.integers(0, 15))
            + draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)),
            draw(st.integers(1, 16) | st.integers(40, 60)),  # beyond what is looked ahead
            priority=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
            arrival_time=iteration * 5.0,
        )
        arrivals.setdefault(iteration, []).append(request)
    longest = max(r.max_total_tokens for group in arrivals.values() for r in group)
    tokens_per_block = draw(st.integers(1, 5))
    max_batch_size = draw(st.integers(1, 6))
    chunking = draw(st.sampled_from([None, *ContextChunkingPolicy]))
    least_tokens = longest if chunking is None else max_batch_size + tokens_per_block
    return Load(
        policy=draw(st.sampled_from(Policy)),
        chunking=chunking,
        tokens_per_block=tokens_per_block,
        num_blocks=-(-longest // tokens_per_block) + draw(st.integers(0, 12)),
        max_batch_size=max_batch_size,
        max_num_tokens=least_tokens + draw(st.integers(0, 12)),
        reuse=draw(st.booleans()),
        windows=draw(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 6)), max_size=2)),
        arrivals=arrivals,
        cancellations=draw(
            st.dictionaries(st.integers(0, 40), st.integers(0, num_requests - 1), max_size=4)
        ),
    )


def window_pool(load: Load, window: int, spare: int) -> FakeWindowPool:
    """One that every request of the load fits alone."""
    longest = max(request.max_total_tokens for request in load.requests)
    rule = FakeWindowPool(0, load.tokens_per_block, window)
    num_blocks = rule.most_blocks(longest, load.max_num_tokens) + spare
    return FakeWindowPool(num_blocks, load.tokens_per_block, window)


def engine_for(load: Load) -> SimulatedEngine:
    scheduler = make_scheduler(
        load.policy,
        max_batch_size=load.max_batch_size,
        max_num_tokens=load.max_num_tokens,
        chunking=load.chunking,
    )
    windows = [window_pool(load, window, spare) for window, spare in load.windows]
    kv = FakeCapacity(load.num_blocks, load.tokens_per_block, reuse=load.reuse, windows=windows)
    return SimulatedEngine(scheduler, kv)


def arrive_and_cancel(load: Load, engine: SimulatedEngine) -> None:
    for request in load.arrivals.get(engine.iteration, ()):
        engine.waiting.push(request)
    cancelled = load.cancellations.get(engine.iteration)
    for request in [*engine.started, *engine.waiting]:
        if request.request_id == cancelled:
            engine.end(request, FinishReason.CANCELLED)


def state_of(engine: SimulatedEngine) -> object:
    """All that a pass could change if it were not pure."""
    requests = [*engine.started, *engine.waiting]
    return (
        [repr(request) for request in requests],
        [request.token_ids.tolist() for request in requests],
        [[pool.num_kept_blocks(r.request_id) for r in requests] for pool in engine.kv.pools],
        [pool.num_free_blocks for pool in engine.kv.pools],
    )


def check_groups(plan: ScheduledBatch, engine: SimulatedEngine) -> None:
    groups = (
        [chunk.request for chunk in plan.context],
        [chunk.request for chunk in plan.generation],
        list(plan.paused),
    )
    everybody = [request for group in groups for request in group]
    assert len(set(everybody)) == len(everybody)
    assert all(request.is_started for request in plan.paused)
    assert all(request.in_generation for request in groups[1])
    assert not any(request.in_generation for request in groups[0])
    newly_started = [r for r in groups[0] if r.state is RequestState.QUEUED]
    assert all(request in engine.waiting for request in newly_started)


def check_budgets(plan: ScheduledBatch, load: Load, engine: SimulatedEngine) -> None:
    assert plan.num_chunks <= load.max_batch_size
    assert plan.num_tokens <= load.max_num_tokens
    num_new = sum(chunk.request.state is RequestState.QUEUED for chunk in plan.context)
    assert len(engine.started) - len(plan.paused) + num_new <= load.max_batch_size


def check_chunks(plan: ScheduledBatch, load: Load) -> None:
    order = [chunk.samples for chunk in plan.chunks]
    assert order == sorted(order), "rows that sample are the tail"
    for chunk in plan.context:
        assert chunk.num_tokens > 0
        assert chunk.samples == (chunk.end == chunk.request.context_length)
        if not chunk.samples:
            assert load.chunking is not None
            assert chunk.num_tokens % load.tokens_per_block == 0
    for chunk in plan.generation:
        assert (chunk.start, chunk.num_tokens) == (chunk.request.num_tokens - 1, 1)


@settings(max_examples=300, deadline=None)
@given(loads())
def test_every_plan_keeps_its_promises_and_every_request_finishes(load: Load) -> None:
    engine = engine_for(load)
    last_arrival = max(load.arrivals)
    patience = last_arrival + sum(2 * request.max_total_tokens for request in load.requests) + 20
    while engine.has_work or engine.iteration <= last_arrival:
        arrive_and_cancel(load, engine)
        before = state_of(engine)
        plan = engine.plan()
        assert state_of(engine) == before
        assert not (plan.is_empty and not plan.paused and engine.has_work), "stuck"
        check_groups(plan, engine)
        check_budgets(plan, load, engine)
        check_chunks(plan, load)
        if load.policy is not Policy.MAX_UTILIZATION:
            assert plan.paused == ()
        engine.apply(plan)  # asserts that the blocks are there
        assert engine.iteration < patience, "livelock"
    assert len(engine.finished) == len(load.requests)
    assert engine.kv.num_free_blocks == load.num_blocks
    assert all(pool.num_free_blocks == pool.num_blocks for pool in engine.kv.windows)


@settings(max_examples=100, deadline=None)
@given(loads())
def test_the_first_in_rank_order_always_goes_on(load: Load) -> None:
    """Why nobody starves: the first started request gets tokens in every pass, or it is paused for
    one of higher rank that has not been started before."""
    engine = engine_for(load)
    while engine.has_work or engine.iteration <= max(load.arrivals):
        arrive_and_cancel(load, engine)
        plan = engine.plan()
        if engine.started:
            first = engine.started[0]
            if first in plan.paused:
                head = next(iter(engine.waiting))
                assert head.num_pauses == 0
                assert head.rank <= first.rank
            elif first.in_generation:
                assert first in [chunk.request for chunk in plan.generation]
        engine.apply(plan)
