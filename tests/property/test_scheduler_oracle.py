"""The capacity rules once more, stated plainly and without regard to speed, against the policies.

Each rule names a longest prefix of some list for which a sum of blocks fits. The oracle tries all
prefixes and recomputes the sums from nothing each time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api import CapacitySchedulerPolicy as Policy
from inflight.batch import LlmRequest
from inflight.scheduler import rank_key
from inflight.scheduler.capacity import (
    LEAST_HORIZON,
    CapacityPlan,
    GuaranteedNoEvict,
    MaxUtilization,
    StaticBatch,
)
from tests.fakes.fake_capacity import FakeCapacity
from tests.fakes.fake_window_pool import FakeWindowPool
from tests.property.test_scheduler_programs import Load, arrive_and_cancel, engine_for, loads
from tests.unit.scheduler.simulated_engine import SimulatedEngine, forked

Decision = tuple[list[int], list[int], list[int], list[int]]
"""Ids of the started that may go on, of the admitted, of the deferred, and of the paused."""


def longest_prefix(
    items: Sequence[LlmRequest], holds: Callable[[Sequence[LlmRequest]], bool]
) -> list[LlmRequest]:
    """The longest prefix such that it and all shorter ones hold."""
    length = 0
    while length < len(items) and holds(items[: length + 1]):
        length += 1
    return list(items[:length])


def ids(requests: Sequence[LlmRequest]) -> list[int]:
    return [request.request_id for request in requests]


class Books:
    """Sums of blocks of one pool over groups of requests, straight from the definitions."""

    def __init__(self, load: Load, kv: FakeCapacity, pool: FakeCapacity | FakeWindowPool) -> None:
        self.load = load
        self.kv = kv
        self.pool = pool

    def _blocks(self, request: LlmRequest, num_tokens: int) -> int:
        """What it holds at most at once on the way to so many tokens."""
        chunk = 1 if request.in_generation else self.load.max_num_tokens
        return self.pool.most_blocks(num_tokens, chunk)

    def _has(self, request: LlmRequest) -> int:
        """Blocks a request need not take from the free ones."""
        if request.is_started:
            return self.pool.num_kept_blocks(request.request_id)
        if self.pool is not self.kv:
            return 0
        match = self.kv.match_prefix(request.request_id, request.token_ids)
        return match.num_referenced_blocks

    def to_completion(self, group: Sequence[LlmRequest]) -> int:
        return sum(self._blocks(r, r.max_total_tokens) - self._has(r) for r in group)

    def one_step(self, group: Sequence[LlmRequest]) -> int:
        """Of started requests."""
        total = 0
        for request in group:
            position = request.context_position
            end = position + min(request.num_tokens - position, self.load.max_num_tokens)
            needed = ceil(end / self.load.tokens_per_block)
            held = self.pool.num_held_blocks(request.request_id)
            num_copied = held - self.pool.num_kept_blocks(request.request_id)
            total += needed - self.pool.num_table_blocks(request.request_id) + num_copied
        return total

    def near_future(self, group: Sequence[LlmRequest]) -> int:
        """To compute all there is and then to generate a horizon further, or to the end."""
        total = 0
        for request in group:
            horizon = max(LEAST_HORIZON, request.num_tokens // 8)
            further = min(horizon, request.max_total_tokens - request.num_tokens)
            total += self._blocks(request, request.num_tokens + further) - self._has(request)
        return total

    @property
    def free(self) -> int:
        return self.pool.num_free_blocks

    def won_by_pausing(self, group: Sequence[LlmRequest]) -> int:
        return sum(self.pool.num_releasable_blocks(r.request_id) for r in group)


class Deferral:
    """Who waits for a block that another computes."""

    def __init__(self, kv: FakeCapacity) -> None:
        self.kv = kv

    def deferred(
        self, started: Sequence[LlmRequest], fitting: Sequence[LlmRequest]
    ) -> list[LlmRequest]:
        """Those that lack a block that a context before them computes next."""
        contexts = [r for r in started if not r.in_generation]
        waiting: list[LlmRequest] = []
        for request in fitting:
            lacking = self.kv.match_prefix(request.request_id, request.token_ids).next_block
            before = [r for r in contexts if rank_key(r) < rank_key(request)]
            if lacking is not None and lacking in [self._next_block(r) for r in before]:
                waiting.append(request)
            else:
                contexts.append(request)
        return waiting

    def _next_block(self, request: LlmRequest) -> bytes | None:
        if request.is_started:
            return self.kv.next_block(request.request_id, request.token_ids)
        return self.kv.match_prefix(request.request_id, request.token_ids).next_block


class Oracle:
    """A request fits where it fits into the books of every pool."""

    def __init__(self, load: Load, kv: FakeCapacity) -> None:
        self.load = load
        self.pools = [Books(load, kv, pool) for pool in (kv, *kv.windows)]
        self.deferral = Deferral(kv)

    def has_slots(self, started: Sequence[LlmRequest], new: Sequence[LlmRequest]) -> bool:
        return len(started) + len(new) <= self.load.max_batch_size

    def kept_by_pausing(
        self,
        started: list[LlmRequest],
        charge: Callable[[Books, Sequence[LlmRequest]], int],
        least: int,
    ) -> int | None:
        """The most started requests whose ``charge`` fits when the others are paused."""
        for kept in range(len(started), least - 1, -1):
            if all(
                charge(books, started[:kept]) <= books.free + books.won_by_pausing(started[kept:])
                for books in self.pools
            ):
                return kept
        return None

    def with_deferred(self, started: list[LlmRequest], fitting: list[LlmRequest]) -> Decision:
        deferred = self.deferral.deferred(started, fitting)
        admitted = [request for request in fitting if request not in deferred]
        return ids(started), ids(admitted), ids(deferred), []


def no_evict(oracle: Oracle, started: list[LlmRequest], queue: list[LlmRequest]) -> Decision:
    def fits(new: Sequence[LlmRequest]) -> bool:
        return oracle.has_slots(started, new) and all(
            books.to_completion(started) + books.to_completion(new) <= books.free
            for books in oracle.pools
        )

    return oracle.with_deferred(started, longest_prefix(queue, fits))


def max_utilization(oracle: Oracle, started: list[LlmRequest], queue: list[LlmRequest]) -> Decision:
    if any(books.one_step(started) > books.free for books in oracle.pools):
        kept = oracle.kept_by_pausing(started, Books.one_step, least=1) or 1
        return ids(started[:kept]), [], [], ids(started[kept:])

    def fits(new: Sequence[LlmRequest]) -> bool:
        return oracle.has_slots(started, new) and all(
            books.near_future([*started, *new]) <= books.free for books in oracle.pools
        )

    fitting = longest_prefix(queue, fits)
    may_pause = queue and not fitting and len(started) < oracle.load.max_batch_size
    if may_pause and queue[0].num_pauses == 0:
        num_before = sum(rank_key(request) < rank_key(queue[0]) for request in started)
        kept_or_none = oracle.kept_by_pausing(
            started,
            lambda books, kept: books.near_future([*kept, queue[0]]),
            least=num_before,
        )
        if kept_or_none is not None:
            return ids(started[:kept_or_none]), [], [], ids(started[kept_or_none:])
    return oracle.with_deferred(started, fitting)


class StaticOracle:
    """Knows its batch by name: whoever was chosen when the last one had drained."""

    def __init__(self) -> None:
        self.batch: set[int] = set()

    def decide(
        self, oracle: Oracle, started: list[LlmRequest], queue: list[LlmRequest]
    ) -> Decision:
        members = [request for request in queue if request.request_id in self.batch]
        if started or members:
            return no_evict(oracle, started, members)
        decision = no_evict(oracle, [], queue)
        self.batch = {*decision[1], *decision[2]}
        return decision


def decision_of(plan: CapacityPlan) -> Decision:
    admitted = [request for request, _ in plan.admitted]
    return ids(plan.started), ids(admitted), ids(plan.deferred), ids(plan.paused)


@settings(max_examples=300, deadline=None)
@given(loads())
def test_policies_decide_as_the_plain_rules_do(load: Load) -> None:
    engine = engine_for(load)
    policy, decide = {
        Policy.GUARANTEED_NO_EVICT: (
            GuaranteedNoEvict(load.max_batch_size, load.max_num_tokens),
            no_evict,
        ),
        Policy.STATIC_BATCH: (
            StaticBatch(load.max_batch_size, load.max_num_tokens),
            StaticOracle().decide,
        ),
        Policy.MAX_UTILIZATION: (
            MaxUtilization(load.max_batch_size, load.max_num_tokens),
            max_utilization,
        ),
    }[load.policy]
    oracle = Oracle(load, engine.kv)
    while engine.has_work or engine.iteration <= max(load.arrivals):
        arrive_and_cancel(load, engine)
        plan = policy.schedule(engine.started, engine.waiting, engine.kv)
        expected = decide(oracle, list(engine.started), list(engine.waiting))
        assert decision_of(plan) == expected
        engine.step()


def fork_one(load: Load, engine: SimulatedEngine, choice: int, child_id: int) -> None:
    """Of the generations that may have a child, if there are any and a slot is free."""
    parents = [request for request in engine.started if request.in_generation]
    if parents and len(engine.started) < load.max_batch_size:
        parent = parents[choice % len(parents)]
        engine.kv.fork(parent.request_id, child_id)
        insort(engine.started, forked(parent, child_id), key=rank_key)


@settings(max_examples=200, deadline=None)
@given(loads(), st.dictionaries(st.integers(0, 40), st.integers(0, 5), max_size=8))
def test_forks_are_charged_for_the_copies_of_what_they_share(
    load: Load, forks: dict[int, int]
) -> None:
    """Only under MAX_UTILIZATION: a fork comes without asking whether it can run to completion."""
    load = replace(load, policy=Policy.MAX_UTILIZATION, windows=[])
    engine = engine_for(load)
    policy = MaxUtilization(load.max_batch_size, load.max_num_tokens)
    oracle = Oracle(load, engine.kv)
    while engine.has_work or engine.iteration <= max(load.arrivals):
        arrive_and_cancel(load, engine)
        if engine.iteration in forks:
            fork_one(load, engine, forks[engine.iteration], 100 + engine.iteration)
        plan = policy.schedule(engine.started, engine.waiting, engine.kv)
        assert decision_of(plan) == max_utilization(
            oracle, list(engine.started), list(engine.waiting)
        )
        engine.step()
