"""GUARANTEED_NO_EVICT and STATIC_BATCH: who is admitted, block by block."""

from __future__ import annotations

from inflight.scheduler.capacity import CapacityPlan, GuaranteedNoEvict, StaticBatch
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import make_request, start


def started_ids(plan: CapacityPlan) -> list[int]:
    return [request.request_id for request in plan.started]


def admitted_ids(plan: CapacityPlan) -> list[int]:
    return [request.request_id for request, _ in plan.admitted]


def test_admits_what_can_run_to_completion() -> None:
    kv = FakeCapacity(num_blocks=5, tokens_per_block=4)
    waiting = [make_request(1, 5, 3), make_request(2, 5, 7)]  # 2 blocks, 3 blocks
    plan = GuaranteedNoEvict(8, 64).schedule([], waiting, kv)
    assert admitted_ids(plan) == [1, 2]
    plan = GuaranteedNoEvict(8, 64).schedule([], [*waiting, make_request(3, 1, 1)], kv)
    assert admitted_ids(plan) == [1, 2]


def test_one_token_over_a_block_costs_the_block() -> None:
    kv = FakeCapacity(num_blocks=2, tokens_per_block=4)
    assert admitted_ids(GuaranteedNoEvict(8, 64).schedule([], [make_request(1, 5, 3)], kv)) == [1]
    assert admitted_ids(GuaranteedNoEvict(8, 64).schedule([], [make_request(2, 5, 4)], kv)) == []


def test_started_requests_keep_the_blocks_they_may_still_need() -> None:
    kv = FakeCapacity(num_blocks=6, tokens_per_block=4)
    started = [start(make_request(1, 4, 9), kv, 4)]  # holds 1 of 4
    fits, too_large = make_request(2, 4, 4), make_request(3, 4, 5)
    assert admitted_ids(GuaranteedNoEvict(8, 64).schedule(started, [fits], kv)) == [2]
    plan = GuaranteedNoEvict(8, 64).schedule(started, [too_large], kv)
    assert admitted_ids(plan) == []
    assert started_ids(plan) == [1]


def test_a_request_that_does_not_fit_holds_back_those_behind() -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=4)
    started = [start(make_request(1, 4, 4), kv, 4)]  # 2 blocks in the end, 2 left
    waiting = [make_request(2, 8, 4), make_request(3, 1, 1)]
    assert admitted_ids(GuaranteedNoEvict(8, 64).schedule(started, waiting, kv)) == []
    assert admitted_ids(GuaranteedNoEvict(8, 64).schedule(started, waiting[1:], kv)) == [3]


def test_started_and_admitted_keep_to_max_batch_size() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=4)
    started = [start(make_request(i, 4, 4), kv, 4) for i in (1, 2)]
    waiting = [make_request(i, 4, 4) for i in (3, 4, 5)]
    assert admitted_ids(GuaranteedNoEvict(4, 64).schedule(started, waiting, kv)) == [3, 4]
    plan = GuaranteedNoEvict(2, 64).schedule(started, waiting, kv)
    assert (admitted_ids(plan), started_ids(plan), plan.paused) == ([], [1, 2], ())


def test_blocks_shared_with_a_started_request_are_not_charged() -> None:
    kv = FakeCapacity(num_blocks=6, tokens_per_block=4)
    prompt = list(range(10, 20))
    started = [start(make_request(1, prompt, 2), kv, 10)]  # 3 blocks, 2 of them full
    twin = make_request(2, prompt, 10)  # 5 blocks, 2 of them shared
    plan = GuaranteedNoEvict(8, 64).schedule(started, [twin], kv)
    assert admitted_ids(plan) == [2]
    assert plan.admitted[0].match == (8, 2, None)
    assert (
        admitted_ids(GuaranteedNoEvict(8, 64).schedule(started, [make_request(3, 10, 10)], kv))
        == []
    )


def test_cached_blocks_that_nobody_holds_are_charged() -> None:
    kv = FakeCapacity(num_blocks=5, tokens_per_block=4)
    prompt = list(range(10, 20))
    start(make_request(1, prompt, 2), kv, 10)
    kv.release(1)
    started = [start(make_request(2, 4, 1), kv, 4)]  # 2 blocks to completion: 3 left
    twin = make_request(3, prompt, 3)  # 4 blocks, though 2 of them are cached
    plan = GuaranteedNoEvict(8, 64).schedule(started, [twin], kv)
    assert kv.match_prefix(3, twin.token_ids)[:2] == (8, 0)
    assert admitted_ids(plan) == []


def test_a_static_batch_admits_nobody_until_it_has_drained() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=4)
    policy = StaticBatch(2, 64)
    first, second, third = (make_request(i, 4, 4) for i in (1, 2, 3))
    assert admitted_ids(policy.schedule([], [first, second, third], kv)) == [1, 2]
    started = [start(first, kv, 4), start(second, kv, 4)]
    assert admitted_ids(policy.schedule(started, [third], kv)) == []
    assert admitted_ids(policy.schedule(started[1:], [third], kv)) == [], "the slot stays empty"
    assert admitted_ids(policy.schedule([], [third], kv)) == [3]


def test_a_static_batch_may_take_several_iterations_to_start() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=4)
    policy = StaticBatch(3, 64)
    chosen = [make_request(i, 4, 4) for i in (1, 2, 3)]
    urgent = make_request(4, 4, 4, priority=1.0)
    assert admitted_ids(policy.schedule([], chosen, kv)) == [1, 2, 3]
    started = [start(chosen[0], kv, 4)]  # the others got no tokens
    plan = policy.schedule(started, [urgent, *chosen[1:]], kv)
    assert (started_ids(plan), admitted_ids(plan)) == ([1], [2, 3])
    assert admitted_ids(policy.schedule(started, [urgent, chosen[2]], kv)) == [3], "2 was cancelled"


def test_the_next_static_batch_is_chosen_when_all_that_were_joining_are_gone() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=4)
    policy = StaticBatch(2, 64)
    assert admitted_ids(policy.schedule([], [make_request(1, 4, 4)], kv)) == [1]
    later = make_request(2, 4, 4)
    assert admitted_ids(policy.schedule([], [later], kv)) == [2], "1 was cancelled"


def test_a_static_batch_goes_on_joining_when_those_that_ran_are_gone() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=4)
    policy = StaticBatch(3, 64)
    chosen = [make_request(i, 4, 4) for i in (1, 2, 3)]
    urgent = make_request(4, 4, 4, priority=1.0)
    policy.schedule([], chosen, kv)
    plan = policy.schedule([], [urgent, *chosen[1:]], kv)  # 1 ran and finished at once
    assert admitted_ids(plan) == [2, 3]
