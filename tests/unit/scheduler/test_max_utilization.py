"""MAX_UTILIZATION: what one step costs, who is paused, and when a paused request comes back."""

from __future__ import annotations

from inflight.batch import LlmRequest
from inflight.scheduler.capacity import CapacityPlan, MaxUtilization
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import make_request, start

T = 4


def outcome(plan: CapacityPlan) -> tuple[list[int], list[int], list[int]]:
    """Ids of (started, admitted, paused)."""
    return (
        [request.request_id for request in plan.started],
        [request.request_id for request, _ in plan.admitted],
        [request.request_id for request in plan.paused],
    )


def paused_once(request: LlmRequest, kv: FakeCapacity) -> LlmRequest:
    """The request as it is after it ran its context and was paused."""
    start(request, kv, request.num_tokens)
    kv.release(request.request_id)
    request.pause()
    return request


def admits(request: LlmRequest, num_blocks: int) -> bool:
    """Whether an idle engine of so many blocks starts the request."""
    kv = FakeCapacity(num_blocks=num_blocks, tokens_per_block=T)
    return outcome(MaxUtilization(8, 12).schedule([], [request], kv)) == ([], [1], [])


def test_a_queued_request_is_charged_for_all_it_has_and_a_horizon() -> None:
    for request, needed in (
        (make_request(1, 20, 100), 13),  # 20 + 32 tokens
        (make_request(1, 21, 100), 14),
        (make_request(1, 20, 8), 7),  # its end is nearer than the horizon
        (make_request(1, 400, 100), 113),  # 400 + 400 / 8
    ):
        assert admits(request, needed) and not admits(request, needed - 1)


def test_what_it_shares_with_a_started_request_is_not_charged() -> None:
    prompt = list(range(10, 30))
    for num_blocks, admitted in ((14, []), (15, [2])):
        kv = FakeCapacity(num_blocks=num_blocks, tokens_per_block=T)
        started = [start(make_request(1, prompt, 4), kv, 20)]  # holds 5, wants 1 more
        twin = make_request(2, prompt, 100, arrival_time=1.0)  # 13, of which it reuses 4
        assert outcome(MaxUtilization(8, 64).schedule(started, [twin], kv)) == ([1], admitted, [])


def test_the_started_keep_a_horizon_when_somebody_wants_to_join() -> None:
    for num_blocks, admitted in ((11, []), (12, [2])):
        kv = FakeCapacity(num_blocks=num_blocks, tokens_per_block=T)
        started = [start(make_request(1, 7, 100), kv, 7)]  # 8 tokens in 2 blocks; 40 want 10
        tiny = make_request(2, 4, 4, arrival_time=1.0)  # 2 blocks to its end
        assert outcome(MaxUtilization(8, 64).schedule(started, [tiny], kv)) == ([1], admitted, [])


def test_the_rest_of_a_started_context_counts_too() -> None:
    for num_blocks, admitted in ((12, []), (13, [2])):
        kv = FakeCapacity(num_blocks=num_blocks, tokens_per_block=T)
        started = [start(make_request(1, 40, 4), kv, 8)]  # holds 2 of the 11 to its end
        tiny = make_request(2, 4, 4, arrival_time=1.0)
        assert outcome(MaxUtilization(8, 8).schedule(started, [tiny], kv)) == ([1], admitted, [])


def test_the_started_go_on_as_long_as_the_next_step_fits() -> None:
    policy = MaxUtilization(8, 8)
    for num_blocks, paused in ((5, []), (4, [2])):
        kv = FakeCapacity(num_blocks=num_blocks, tokens_per_block=T)
        chunked = start(make_request(1, 40, 8), kv, 8)  # 2 blocks held, 2 for the next chunk
        inside_a_block = start(make_request(2, 3, 8), kv, 3)  # 1 block, none for the next token
        plan = policy.schedule([chunked, inside_a_block], [], kv)
        assert outcome(plan) == ([1, 2] if not paused else [1], [], paused)


def test_pauses_the_last_in_rank_when_the_started_cannot_all_go_on() -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=T)
    started = [start(make_request(i, 4, 8), kv, 4) for i in (1, 2, 3)]  # 1 free, 3 needed
    assert outcome(MaxUtilization(8, 64).schedule(started, [], kv)) == ([1, 2], [], [3])


def test_pauses_as_many_as_it_takes_but_never_the_first() -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=T)
    started = [start(make_request(1, 16, 8), kv, 8)]  # needs the whole pool
    started += [start(make_request(i, 3, 8), kv, 3) for i in (2, 3)]
    assert outcome(MaxUtilization(8, 64).schedule(started, [], kv)) == ([1], [], [2, 3])


def test_the_first_goes_on_whatever_the_paused_share_between_them() -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=T)
    prompt = list(range(10, 18))
    first = start(make_request(1, 16, 8), kv, 4)  # needs 3 more: the whole pool
    second = start(make_request(2, prompt[:7], 8), kv, 7)
    third = make_request(3, prompt, 8)
    kv.reserve([(3, T, third.token_ids)])  # its first block is that of the second
    third.advance(T, 4)
    third.append(0)
    assert [kv.num_releasable_blocks(i) for i in (2, 3)] == [1, 1], "of the 3 they hold"
    plan = MaxUtilization(8, 64).schedule([first, second, third], [], kv)
    assert outcome(plan) == ([1], [], [2, 3])
    kv.release(2)
    kv.release(3)
    plan = MaxUtilization(8, 64).schedule([first], [], kv)
    assert outcome(plan) == ([1], [], [])


def test_a_pass_that_pauses_admits_nobody() -> None:
    kv = FakeCapacity(num_blocks=12, tokens_per_block=T)
    started = [start(make_request(1, 4, 8), kv, 4), start(make_request(2, 44, 4), kv, 44)]
    tiny = make_request(3, 1, 1, arrival_time=1.0)
    plan = MaxUtilization(8, 64).schedule(started, [tiny], kv)
    assert outcome(plan) == ([1], [], [2]), "11 blocks come free, but only after this pass"
    assert kv.matched == []


def test_a_queued_request_pauses_only_those_that_rank_after_it() -> None:
    kv = FakeCapacity(num_blocks=6, tokens_per_block=T)
    started = [
        start(make_request(1, 7, 8, arrival_time=0.0), kv, 7),
        start(make_request(2, 7, 8, arrival_time=2.0), kv, 7),
    ]
    policy = MaxUtilization(8, 64)
    between = make_request(3, 5, 1, arrival_time=1.0)
    assert outcome(policy.schedule(started, [between], kv)) == ([1], [], [2])
    after = make_request(4, 5, 1, arrival_time=3.0)
    assert outcome(policy.schedule(started, [after], kv)) == ([1, 2], [], [])


def test_a_queued_request_pauses_nobody_where_that_is_too_little() -> None:
    kv = FakeCapacity(num_blocks=6, tokens_per_block=T)
    started = [
        start(make_request(1, 7, 8, arrival_time=0.0), kv, 7),
        start(make_request(2, 7, 8, arrival_time=2.0), kv, 7),
    ]
    large = make_request(3, 12, 1, arrival_time=1.0)
    assert outcome(MaxUtilization(8, 64).schedule(started, [large], kv)) == ([1, 2], [], [])


def test_a_paused_request_pauses_nobody() -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=T)
    urgent = paused_once(make_request(1, 7, 8, priority=1.0), kv)
    started = [start(make_request(2, 7, 8), kv, 7)]
    policy = MaxUtilization(8, 64)
    assert outcome(policy.schedule(started, [urgent], kv)) == ([2], [], [])
    new = make_request(3, 7, 8, priority=1.0)
    assert outcome(policy.schedule(started, [new], kv)) == ([], [], [2]), "as a new one would"


def test_the_request_count_pauses_nobody() -> None:
    kv = FakeCapacity(num_blocks=100, tokens_per_block=T)
    started = [start(make_request(i, 4, 8, priority=0.1), kv, 4) for i in (1, 2)]
    urgent = make_request(3, 4, 1, priority=1.0)
    assert outcome(MaxUtilization(2, 64).schedule(started, [urgent], kv)) == ([1, 2], [], [])


def test_a_paused_request_comes_back_when_all_can_get_a_horizon_further() -> None:
    for num_blocks, admitted in ((29, []), (30, [9])):
        kv = FakeCapacity(num_blocks=num_blocks, tokens_per_block=T, reuse=False)
        back = paused_once(make_request(9, 14, 100, arrival_time=9.0), kv)  # 15 + 32: 12 blocks
        started = [start(make_request(i, 3, 100), kv, 3) for i in (1, 2)]  # 4 + 32: 9 each
        policy = MaxUtilization(8, 8)
        assert outcome(policy.schedule(started, [back], kv)) == ([1, 2], admitted, [])


def test_a_paused_request_that_does_not_fit_holds_back_those_behind() -> None:
    kv = FakeCapacity(num_blocks=6, tokens_per_block=T, reuse=False)
    back = paused_once(make_request(1, 14, 2, arrival_time=1.0), kv)
    started = [start(make_request(2, 3, 8), kv, 3)]
    tiny = make_request(3, 1, 1, arrival_time=2.0)
    policy = MaxUtilization(8, 64)
    assert outcome(policy.schedule(started, [back, tiny], kv)) == ([2], [], [])
    assert outcome(policy.schedule(started, [tiny], kv)) == ([2], [3], [])


def test_an_idle_engine_takes_a_paused_request_that_fills_the_pool() -> None:
    kv = FakeCapacity(num_blocks=4, tokens_per_block=T)
    back = paused_once(make_request(1, 15, 1), kv)
    assert outcome(MaxUtilization(8, 8).schedule([], [back], kv)) == ([], [1], [])
