"""The usual walkthrough of in-flight batching, in figures.

At most 8 sequences, 100 blocks of 16 tokens. Six requests hold 70 blocks and may grow by 10 in all,
or by 73; the first of them has priority 0.3, all others 0.5. Then a prompt of 200 tokens and one of
1,500 arrive, 40 tokens to generate each.
"""

from __future__ import annotations

from inflight.api import CapacitySchedulerPolicy as Policy
from inflight.batch import LlmRequest
from inflight.scheduler import rank_key
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import (
    SimulatedEngine,
    make_request,
    make_scheduler,
    start,
)

LOW_PRIORITY, SHORT, LONG = 1, 7, 8


def engine_with_six_running(policy: Policy, max_tokens: int, may_grow: int) -> SimulatedEngine:
    engine = SimulatedEngine(
        make_scheduler(policy, max_batch_size=8, max_num_tokens=128),
        FakeCapacity(num_blocks=100, tokens_per_block=16),
    )
    six = [
        make_request(i, 184, max_tokens, priority=0.3 if i == LOW_PRIORITY else 0.5)
        for i in range(1, 5)
    ]
    six += [make_request(i, 168, max_tokens - 16) for i in (5, 6)]
    for request in six:
        start(request, engine.kv, request.num_tokens)
    engine.started = sorted(six, key=rank_key)
    assert sum(-(-request.max_total_tokens // 16) for request in six) - 70 == may_grow
    assert engine.kv.num_free_blocks == 30
    return engine


def arrivals(engine: SimulatedEngine) -> tuple[LlmRequest, LlmRequest]:
    short = make_request(SHORT, 200, 40, arrival_time=1.0)
    long = make_request(LONG, 1500, 40, arrival_time=1.0)
    engine.waiting.push(long)
    engine.waiting.push(short)
    return short, long


def test_guaranteed_no_evict_admits_the_short_and_holds_the_long() -> None:
    engine = engine_with_six_running(Policy.GUARANTEED_NO_EVICT, max_tokens=40, may_grow=10)
    short, long = arrivals(engine)
    engine.step()
    assert (short.is_started, long.is_started) == (True, False)
    others = [*engine.started]
    while engine.has_work:
        assert engine.step().paused == ()
        if long.is_started:
            assert not any(request.is_started for request in others), "97 blocks need them all gone"
    assert len(engine.finished) == 8


def test_guaranteed_no_evict_admits_nobody_while_the_six_may_need_the_rest() -> None:
    engine = engine_with_six_running(Policy.GUARANTEED_NO_EVICT, max_tokens=200, may_grow=70)
    short, _ = arrivals(engine)
    engine.step()
    assert not short.is_started


def test_max_utilization_admits_the_short_and_pauses_the_low_priority_first() -> None:
    engine = engine_with_six_running(Policy.MAX_UTILIZATION, max_tokens=200, may_grow=70)
    short, long = arrivals(engine)
    pauses: list[int] = []
    engine.step()
    assert (short.is_started, long.is_started) == (True, False)
    while not pauses and engine.has_work:
        pauses += [request.request_id for request in engine.step().paused]
    assert pauses == [LOW_PRIORITY]
    while engine.has_work:
        engine.step()
    assert len(engine.finished) == 8
    assert engine.kv.num_free_blocks == 100
