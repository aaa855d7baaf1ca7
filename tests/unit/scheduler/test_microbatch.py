"""The token budget: how it is shared, and in which order rows are packed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.api import ContextChunkingPolicy
from inflight.batch import LlmRequest, Phase, ScheduledChunk
from inflight.scheduler import PrefixMatch
from inflight.scheduler.capacity import AdmittedRequest, CapacityPlan
from inflight.scheduler.latency_target import LatencyTarget
from inflight.scheduler.microbatch import (
    MicroBatchScheduler,
    share_equal_progress,
    share_first_come_first_served,
    share_whole,
)
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import make_request, start

T = 4
FCFS = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED


def generating(*request_ids: int) -> list[LlmRequest]:
    kv = FakeCapacity(num_blocks=1000, tokens_per_block=T)
    return [start(make_request(i, 4, 8), kv, 4) for i in request_ids]


def queued(request_id: int, prompt_length: int, num_reused: int = 0) -> AdmittedRequest:
    request = make_request(request_id, prompt_length, 8)
    return AdmittedRequest(request, PrefixMatch(num_reused, 0))


def extents(chunks: tuple[ScheduledChunk, ...]) -> list[tuple[int, int, int, bool]]:
    return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in chunks]


class TargetOf(LatencyTarget):
    """Allows so many context tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(50)
        self._num_tokens = num_tokens

    def context_tokens(self, generation: Sequence[ScheduledChunk], start: int) -> int:
        return self._num_tokens


def test_without_chunking_contexts_are_whole_and_the_first_misfit_ends_it() -> None:
    assert share_whole([5, 6, 1], 12, T) == [5, 6, 1]
    assert share_whole([5, 6, 1], 11, T) == [5, 6, 0]
    assert share_whole([5, 7, 1], 11, T) == [5, 0, 0]


def test_first_come_first_served_cuts_to_whole_blocks() -> None:
    assert share_first_come_first_served([5, 6], 11, T) == [5, 6], "all fits: nothing is cut"
    assert share_first_come_first_served([5, 9], 12, T) == [5, 4]
    assert share_first_come_first_served([5, 9], 8, T) == [5, 0]
    assert share_first_come_first_served([20, 3], 11, T) == [8, 3], "what a cut leaves goes on"


def test_equal_progress_gives_one_block_each_in_turn() -> None:
    assert share_equal_progress([5, 6], 11, T) == [5, 6], "all fits: nothing is cut"
    assert share_equal_progress([20, 20, 20], 24, T) == [8, 8, 8]
    assert share_equal_progress([20, 20, 20], 20, T) == [8, 8, 4]
    assert share_equal_progress([20, 6, 20], 19, T) == [8, 6, 4]
    assert share_equal_progress([20, 20], 3, T) == [0, 0]


def test_generations_come_first_in_the_budget() -> None:
    plan = CapacityPlan(generating(1, 2, 3), [queued(4, 20)])
    context, generation = MicroBatchScheduler(8, 12, FCFS).schedule(plan, T)
    assert extents(generation) == [(i, 4, 1, True) for i in (1, 2, 3)]
    assert extents(context) == [(4, 0, 8, False)], "9 tokens left: 2 whole blocks"
    assert {chunk.phase for chunk in generation} == {Phase.GENERATION}
    assert {chunk.phase for chunk in context} == {Phase.CONTEXT}


def test_generations_keep_to_the_token_budget() -> None:
    plan = CapacityPlan(generating(1, 2, 3), [queued(4, 1)])
    context, generation = MicroBatchScheduler(8, 2, None).schedule(plan, T)
    assert [chunk.request.request_id for chunk in generation] == [1, 2]
    assert context == ()


@pytest.mark.parametrize(("allowed", "shares"), [(3, [3]), (6, [4]), (9, [8]), (30, [20, 2])])
@pytest.mark.parametrize("chunking", list(ContextChunkingPolicy))
def test_a_latency_target_below_a_block_cuts_inside_it(
    chunking: ContextChunkingPolicy, allowed: int, shares: list[int]
) -> None:
    """Above it whole blocks are given, as without a target."""
    scheduler = MicroBatchScheduler(8, 64, chunking, TargetOf(allowed))
    queue = [queued(4, 20), queued(5, 2)] if len(shares) == 2 else [queued(4, 20)]
    context, generation = scheduler.schedule(CapacityPlan(generating(1), queue), T)
    assert [chunk.num_tokens for chunk in context] == shares and len(generation) == 1
    context, _ = scheduler.schedule(CapacityPlan([], queue), T)
    assert context[0].num_tokens == 20, "without streams nothing has to keep pace"


def test_rows_keep_to_max_batch_size() -> None:
    plan = CapacityPlan(generating(1, 2), [queued(3, 2), queued(4, 2), queued(5, 2)])
    context, generation = MicroBatchScheduler(4, 64, FCFS).schedule(plan, T)
    assert [chunk.request.request_id for chunk in context] == [3, 4]
    assert len(generation) == 2


def test_reused_tokens_cost_nothing() -> None:
    plan = CapacityPlan([], [queued(1, 20, num_reused=16), queued(2, 6)])
    context, _ = MicroBatchScheduler(4, 10, FCFS).schedule(plan, T)
    assert extents(context) == [(1, 16, 4, True), (2, 0, 6, True)]


def test_a_started_context_goes_on_where_it_was() -> None:
    kv = FakeCapacity(num_blocks=1000, tokens_per_block=T)
    started = [start(make_request(1, 20, 8), kv, 8)]
    context, _ = MicroBatchScheduler(4, 8, FCFS).schedule(CapacityPlan(started), T)
    assert extents(context) == [(1, 8, 8, False)]
    started[0].advance(8, 8)
    context, _ = MicroBatchScheduler(4, 8, FCFS).schedule(CapacityPlan(started), T)
    assert extents(context) == [(1, 16, 4, True)]


def test_contexts_that_finish_are_packed_after_those_that_do_not() -> None:
    plan = CapacityPlan([], [queued(1, 3), queued(2, 30), queued(3, 3)])
    policy = ContextChunkingPolicy.EQUAL_PROGRESS
    context, _ = MicroBatchScheduler(4, 14, policy).schedule(plan, T)
    assert extents(context) == [(2, 0, 8, False), (1, 0, 3, True), (3, 0, 3, True)]


def test_tokens_go_by_rank_to_started_and_admitted_alike() -> None:
    kv = FakeCapacity(num_blocks=1000, tokens_per_block=T)
    started = [start(make_request(1, 20, 8, priority=0.2), kv, 8)]
    urgent = AdmittedRequest(make_request(2, 10, 8, priority=0.9), PrefixMatch(0, 0))
    context, _ = MicroBatchScheduler(4, 15, FCFS).schedule(CapacityPlan(started, [urgent]), T)
    assert extents(context) == [(1, 8, 4, False), (2, 0, 10, True)]


def test_a_paused_request_replays_its_generated_tokens() -> None:
    kv = FakeCapacity(num_blocks=1000, tokens_per_block=T)
    request = start(make_request(1, 6, 8), kv, 6)
    kv.release(1)
    request.pause()
    plan = CapacityPlan([], [AdmittedRequest(request, PrefixMatch(4, 0))])
    context, generation = MicroBatchScheduler(4, 16, FCFS).schedule(plan, T)
    assert extents(context) == [(1, 4, 3, True)]
    assert generation == ()


@pytest.mark.parametrize("chunking", [None, *ContextChunkingPolicy])
def test_nothing_to_do_gives_nothing(chunking: ContextChunkingPolicy | None) -> None:
    assert MicroBatchScheduler(4, 16, chunking).schedule(CapacityPlan([]), T) == ((), ())
