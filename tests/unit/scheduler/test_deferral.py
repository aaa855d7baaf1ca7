"""A request whose prefix is about to be computed by another waits for it, and then reuses it."""

from __future__ import annotations

import pytest

from inflight.api import CapacitySchedulerPolicy as Policy
from inflight.scheduler.capacity import (
    CapacityPlan,
    GuaranteedNoEvict,
    MaxUtilization,
    StaticBatch,
)
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import (
    SimulatedEngine,
    make_request,
    make_scheduler,
    start,
)

T = 4
PROMPT = list(range(10, 26))
POLICIES = [GuaranteedNoEvict(8, 64), MaxUtilization(8, 64)]


def outcome(plan: CapacityPlan) -> tuple[list[int], list[int]]:
    """Ids of (admitted, deferred)."""
    admitted = [request.request_id for request, _ in plan.admitted]
    return admitted, [request.request_id for request in plan.deferred]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_second_of_two_equal_prompts_waits_for_the_first(policy: object) -> None:
    kv = FakeCapacity(num_blocks=20, tokens_per_block=T)
    first, second = make_request(1, PROMPT, 4), make_request(2, [*PROMPT, 99], 4)
    assert outcome(policy.schedule([], [first, second], kv)) == ([1], [2])
    start(first, kv, 16)
    plan = policy.schedule([first], [second], kv)
    assert outcome(plan) == ([2], [])
    assert plan.admitted[0].match.num_tokens == 16


@pytest.mark.parametrize("policy", POLICIES)
def test_those_behind_with_other_prefixes_do_not_wait(policy: object) -> None:
    kv = FakeCapacity(num_blocks=40, tokens_per_block=T)
    waiting = [make_request(1, PROMPT, 4), make_request(2, PROMPT, 4), make_request(3, 16, 4)]
    assert outcome(policy.schedule([], waiting, kv)) == ([1, 3], [2])


def test_a_chunked_context_is_waited_for_as_long_as_the_prompts_are_equal() -> None:
    policy = GuaranteedNoEvict(8, 64)
    for length, expected in ((4, ([], [2])), (8, ([2], []))):
        kv = FakeCapacity(num_blocks=40, tokens_per_block=T)
        started = [start(make_request(1, PROMPT, 4), kv, length)]
        branches_off_after_eight = make_request(2, [*PROMPT[:8], 70, 71, 72, 73, 74], 4)
        assert outcome(policy.schedule(started, [branches_off_after_eight], kv)) == expected


def test_nobody_waits_for_one_that_ranks_after_him() -> None:
    kv = FakeCapacity(num_blocks=40, tokens_per_block=T)
    started = [start(make_request(1, PROMPT, 4, arrival_time=5.0), kv, 4)]
    urgent = make_request(2, PROMPT, 4, arrival_time=1.0)
    assert outcome(GuaranteedNoEvict(8, 64).schedule(started, [urgent], kv)) == ([2], [])


def test_a_generation_is_not_waited_for() -> None:
    kv = FakeCapacity(num_blocks=40, tokens_per_block=T)
    running = start(make_request(1, PROMPT[:6], 8), kv, 6)
    twin = make_request(2, PROMPT, 4)
    assert outcome(GuaranteedNoEvict(8, 64).schedule([running], [twin], kv)) == ([2], [])


@pytest.mark.parametrize("policy", POLICIES)
def test_without_reuse_nobody_waits(policy: object) -> None:
    kv = FakeCapacity(num_blocks=20, tokens_per_block=T, reuse=False)
    waiting = [make_request(1, PROMPT, 4), make_request(2, PROMPT, 4)]
    assert outcome(policy.schedule([], waiting, kv)) == ([1, 2], [])


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_behind_takes_the_place_of_one_that_waits(policy: object) -> None:
    waiting = [make_request(1, PROMPT, 4), make_request(2, PROMPT, 4), make_request(3, 16, 4)]
    step = 5 if isinstance(policy, GuaranteedNoEvict) else 4
    kv = FakeCapacity(num_blocks=3 * step - 1, tokens_per_block=T)
    assert outcome(policy.schedule([], waiting, kv)) == ([1], [2])
    slots = GuaranteedNoEvict(2, 64)
    kv = FakeCapacity(num_blocks=100, tokens_per_block=T)
    assert outcome(slots.schedule([], waiting, kv)) == ([1], [2])


def test_who_waits_is_a_member_of_the_static_batch() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=T)
    policy = StaticBatch(2, 64)
    first, second, third = (make_request(i, PROMPT, 4) for i in (1, 2, 3))
    assert outcome(policy.schedule([], [first, second, third], kv)) == ([1], [2])
    started = [start(first, kv, 16)]
    assert outcome(policy.schedule(started, [second, third], kv)) == ([2], [])


@pytest.mark.parametrize("policy", Policy)
def test_a_common_prefix_is_computed_once(policy: Policy) -> None:
    engine = SimulatedEngine(
        make_scheduler(policy, max_batch_size=8, max_num_tokens=20),
        FakeCapacity(num_blocks=200, tokens_per_block=T),
    )
    common = list(range(10, 50))
    for request_id in range(8):
        engine.waiting.push(make_request(request_id, [*common, 1000 + request_id, 7], 1))
    num_computed = 0
    while engine.has_work:
        num_computed += engine.step().num_context_tokens
    assert num_computed == 40 + 8 * 2
