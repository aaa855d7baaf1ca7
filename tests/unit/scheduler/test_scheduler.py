"""The two stages together: one frozen plan a pass, and nothing changed by it."""

from __future__ import annotations

import pytest

from inflight.api import CapacitySchedulerPolicy as Policy
from inflight.api import FinishReason
from inflight.batch import RequestState
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import (
    SimulatedEngine,
    make_request,
    make_scheduler,
)


@pytest.mark.parametrize("policy", Policy)
def test_an_engine_without_requests_has_an_empty_plan(policy: Policy) -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=4)
    plan = make_scheduler(policy).schedule(17, [], [], kv)
    assert plan.is_empty
    assert plan.paused == ()
    assert plan.iteration == 17


@pytest.mark.parametrize("policy", Policy)
def test_a_request_runs_from_queue_to_end(policy: Policy) -> None:
    engine = SimulatedEngine(
        make_scheduler(policy, max_batch_size=2, max_num_tokens=8),
        FakeCapacity(num_blocks=8, tokens_per_block=4),
    )
    request = make_request(1, 10, 3)
    engine.waiting.push(request)
    extents = []
    while engine.has_work:
        (chunk,) = engine.step().chunks
        extents.append((chunk.start, chunk.num_tokens, chunk.samples))
    assert extents == [(0, 8, False), (8, 2, True), (10, 1, True), (11, 1, True)]
    assert request.finish_reason is FinishReason.LENGTH
    assert engine.kv.num_free_blocks == 8


@pytest.mark.parametrize("policy", Policy)
def test_an_admitted_request_without_tokens_stays_queued(policy: Policy) -> None:
    engine = SimulatedEngine(
        make_scheduler(policy, max_batch_size=4, max_num_tokens=8),
        FakeCapacity(num_blocks=64, tokens_per_block=4),
    )
    first, second = make_request(1, 20, 2), make_request(2, 20, 2)
    engine.waiting.push(first)
    engine.waiting.push(second)
    engine.step()
    assert (first.state, second.state) == (RequestState.CONTEXT_IN_PROGRESS, RequestState.QUEUED)
    for _ in range(3):
        engine.step()
    assert second.state is RequestState.CONTEXT_IN_PROGRESS


@pytest.mark.parametrize("policy", Policy)
def test_each_queued_request_is_matched_at_most_once_a_pass(policy: Policy) -> None:
    kv = FakeCapacity(num_blocks=64, tokens_per_block=4)
    waiting = [make_request(i, 6, 2) for i in range(1, 30)]
    make_scheduler(policy, max_batch_size=8).schedule(0, [], waiting, kv)
    assert kv.matched == list(range(1, 9)), "and none that has no slot"


def test_a_second_request_reuses_what_the_first_holds() -> None:
    engine = SimulatedEngine(
        make_scheduler(Policy.GUARANTEED_NO_EVICT, max_num_tokens=64),
        FakeCapacity(num_blocks=8, tokens_per_block=4),
    )
    prompt = list(range(10, 20))
    engine.waiting.push(make_request(1, prompt, 8))
    engine.step()
    engine.waiting.push(make_request(2, prompt, 8))
    plan = engine.step()
    assert [(c.start, c.num_tokens) for c in plan.context] == [(8, 2)]
    assert engine.kv.num_free_blocks == 8 - 3 - 1


def test_a_paused_request_runs_again_and_finishes() -> None:
    engine = SimulatedEngine(
        make_scheduler(Policy.MAX_UTILIZATION), FakeCapacity(num_blocks=24, tokens_per_block=4)
    )
    requests = [make_request(i, 6, 80) for i in (1, 2)]  # 22 blocks each in the end
    for request in requests:
        engine.waiting.push(request)
    while engine.has_work:
        engine.step()
    assert [request.num_pauses for request in requests] == [0, 1]
    assert [request.num_generated_tokens for request in requests] == [80, 80]
    assert engine.finished == requests
