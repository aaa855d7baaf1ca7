"""Stage 1, capacity: which requests may hold KV blocks in this iteration, and who is paused.

A policy reads the requests and the KV cache's counts, and changes neither. It keeps its books in
blocks of each pool, and a request fits where it fits into all of them. They start from the blocks
that are free now:

- A started request's blocks are held, so only what it needs beyond them is charged. Where forks
  share a block that they write next, each is charged a copy, though the last one needs none.
- A queued request is charged all its blocks but those it would share with a started request
  (``PrefixMatch.num_referenced_blocks``). Its other reusable blocks count as free, so taking them
  costs as much as taking empty ones.
- Where the layers of a pool have a sliding window, a request is charged the most that it holds at
  once, and nothing is credited: what it shares now it will have to hold by itself later.
- Two queued requests that share a prefix are both charged for it. The books thus err only by
  counting too few blocks as free; what a plan admits, ``reserve`` can serve.
- A queued request that fits, but whose first block that is not in the cache is just what a context
  before it computes next, is *deferred*: it is charged like an admitted one, so that nobody behind
  it takes its place, and starts an iteration later with that block reused.

A request that would not fit alone is refused when it is enqueued; the policies rely on that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from inflight.api.kv import PrefixMatch
from inflight.batch import LlmRequest, RequestState
from inflight.scheduler.ports import KvCapacity, PoolCapacity
from inflight.scheduler.room import Room
from inflight.scheduler.waiting_queue import rank_key

LEAST_HORIZON = 32
"""How far MAX_UTILIZATION looks ahead before it lets a request start, in tokens of each request; of
a long one an eighth of its tokens, because the longer it is, the more a pause makes it replay.

With half the blocks that were wanted (tests/benchmarks/oversubscription.py), of 16, 32, 64 and 128
tokens 32 gave the most tokens per second for answers of 170 tokens; for answers of 800 it gave 3%
less than 128, and an eighth, a quarter and a half of the tokens differed by less than 2%."""


class AdmittedRequest(NamedTuple):
    """A queued request that may start, with what it would reuse."""

    request: LlmRequest
    match: PrefixMatch


@dataclass(frozen=True, slots=True, eq=False)
class CapacityPlan:
    """Who may run in this iteration as far as blocks go; each group in rank order.

    ``admitted`` is empty wherever ``paused`` is not.
    """

    started: Sequence[LlmRequest]
    """Requests that hold blocks, and for which there are blocks to go on."""
    admitted: Sequence[AdmittedRequest] = ()
    deferred: Sequence[LlmRequest] = ()
    """Queued requests that would fit and wait for a block that is about to be computed."""
    paused: Sequence[LlmRequest] = ()
    """Started requests that must give their blocks back."""


class CapacityPolicy(Protocol):
    """One of the three policies."""

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        """Both groups come in rank order; ``waiting`` is read only as far as needed."""
        ...


def blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold ``num_tokens`` tokens: ceil(num_tokens / tokens_per_block)."""
    return -(-num_tokens // tokens_per_block)


class GuaranteedNoEvict:
    """Admits a request only if everybody can then run to completion; never pauses.

    Every started request keeps the right to all blocks that it will hold at once until it has
    ``max_total_tokens``. The queue is served strictly in order: the first request that does not fit
    holds back all behind it, so that small requests cannot starve a large one.
    """

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        candidates = _candidates(waiting, self._max_batch_size - len(started))
        if not candidates:
            return CapacityPlan(started)
        chunk = self._max_num_tokens
        generation = RequestState.GENERATION_IN_PROGRESS
        ends = [(r.max_total_tokens, 1 if r.state is generation else chunk) for r in started]
        room = Room(started, ends, kv.pools)
        entrants = _Entrants(started, kv)
        for request in candidates:
            match = kv.match_prefix(request.request_id, request.token_ids)
            if room.after(request.max_total_tokens, chunk, match) < 0:
                break
            entrants.add(request, match)
        return CapacityPlan(started, entrants.admitted, entrants.deferred)


class StaticBatch:
    """The baseline: a batch chosen by GuaranteedNoEvict's arithmetic runs until it has drained.

    The slots of its finished requests stay empty, and the next batch is chosen when nothing of this
    one is left. When the contexts of a batch exceed ``max_num_tokens`` it takes several iterations
    to start; the policy remembers which of the chosen requests still wait, its only state.
    """

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        self._no_evict = GuaranteedNoEvict(max_batch_size, max_num_tokens)
        self._joining: frozenset[int] = frozenset()

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        joining = [r for r in waiting if r.request_id in self._joining] if self._joining else []
        has_drained = not started and not joining
        plan = self._no_evict.schedule(started, waiting if has_drained else joining, kv)
        chosen = [*plan.deferred, *(request for request, _ in plan.admitted)]
        self._joining = frozenset(request.request_id for request in chosen)
        return plan


class MaxUtilization:
    """Charges every request for the near future only; pauses the last in rank when blocks run out.

    A started request goes on while there are blocks for its next step: its uncomputed tokens, at
    most ``max_num_tokens`` (exactly one in the generation phase). When the started ones cannot all
    go on, requests are paused from the end of rank order; never the first, which alone in the pool
    always fits.

    A queued request starts only if it and everybody before it can then get a horizon further than
    they are, or to their end: LEAST_HORIZON tokens, or an eighth of what each has. That is the
    hysteresis: what a pause frees is not given away again before it is enough for a while, to a new
    request as little as to the paused one.

    The first of the queue may have requests paused that rank after it, if it was never paused
    itself and if that makes enough room. Nobody is paused because ``max_batch_size`` requests are
    started. A pass either pauses or admits, never both: the blocks of a paused request may be the
    very ones that an admitted one would share, so the next pass counts what really came free.
    """

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        needs = [self._step_needs(started, pool) for pool in kv.pools]
        missing = [
            sum(of_pool) - pool.num_free_blocks
            for of_pool, pool in zip(needs, kv.pools, strict=True)
        ]
        if max(missing) > 0:
            num_kept, _ = _num_kept(started, needs, 1, missing, kv.pools)
            return CapacityPlan(started[:num_kept], paused=started[num_kept:])
        candidates = _candidates(waiting, self._max_batch_size - len(started))
        if not candidates:
            return CapacityPlan(started)
        chunk, generation = self._max_num_tokens, RequestState.GENERATION_IN_PROGRESS
        ends = [(_horizon(r), 1 if r.state is generation else chunk) for r in started]
        room = Room(started, ends, kv.pools)
        entrants = _Entrants(started, kv)
        for request in candidates:
            match = kv.match_prefix(request.request_id, request.token_ids)
            if room.after(_horizon(request), chunk, match) < 0:
                if request is candidates[0] and not request.num_pauses:
                    return _make_room(request, room, started, kv.pools)
                break
            entrants.add(request, match)
        return CapacityPlan(started, entrants.admitted, entrants.deferred)

    def _step_needs(self, started: Sequence[LlmRequest], pool: PoolCapacity) -> list[int]:
        """Blocks that the next step of each started request takes from the free ones."""
        # The rule for contexts holds for generations too; most are generations, and + 1 is faster.
        limit, num_new_blocks = self._max_num_tokens, pool.num_new_blocks
        generation = RequestState.GENERATION_IN_PROGRESS
        return [
            num_new_blocks(
                r.request_id,
                r.context_position + 1
                if r.state is generation
                else min(r.num_tokens, r.context_position + limit),
            )
            for r in started
        ]


def _horizon(request: LlmRequest) -> int:
    """Tokens of a request that has computed all it has and then gone its horizon further."""
    num_tokens = request.num_tokens
    return min(num_tokens + max(LEAST_HORIZON, num_tokens // 8), request.max_total_tokens)


class _Entrants:
    """The queued requests of one pass for which there is room, in rank order: those that start, and
    those that wait for a block that one before them is about to compute."""

    def __init__(self, started: Sequence[LlmRequest], kv: KvCapacity) -> None:
        self.admitted: list[AdmittedRequest] = []
        self.deferred: list[LlmRequest] = []
        self._started = started
        self._kv = kv
        self._producers: dict[bytes, tuple[float, int]] | None = None
        """The rank key of whoever computes a block next, by its name; looked up when needed."""

    def add(self, request: LlmRequest, match: PrefixMatch) -> None:
        """``request`` fits, and ranks after all that were added before."""
        name = match.next_block
        if name is not None:
            if self._producers is None:
                self._producers = self._started_producers()
            key = rank_key(request)
            if self._producers.setdefault(name, key) < key:
                self.deferred.append(request)
                return
            self._producers[name] = key
        self.admitted.append(AdmittedRequest(request, match))

    def _started_producers(self) -> dict[bytes, tuple[float, int]]:
        producers: dict[bytes, tuple[float, int]] = {}
        for request in self._started:
            if request.state is RequestState.CONTEXT_IN_PROGRESS:
                name = self._kv.next_block(request.request_id, request.token_ids)
                if name is not None:
                    producers.setdefault(name, rank_key(request))
        return producers


def _candidates(waiting: Iterable[LlmRequest], num_slots: int) -> list[LlmRequest]:
    """The queued requests for which there are slots (none, if ``num_slots`` is not positive)."""
    return list(islice(waiting, max(num_slots, 0)))


def _make_room(
    request: LlmRequest,
    room: Room,
    started: Sequence[LlmRequest],
    pools: Sequence[PoolCapacity],
) -> CapacityPlan:
    """Pauses requests that rank after a queued one, which ``room`` counts, for its sake; nobody, if
    that is too little."""
    first_victim = bisect_right(started, rank_key(request), key=rank_key)
    missing = [-left for left in room.left]
    claims = room.claims(started)
    num_kept, still_missing = _num_kept(started, claims, first_victim, missing, pools)
    if max(still_missing) > 0:
        return CapacityPlan(started)
    return CapacityPlan(started[:num_kept], paused=started[num_kept:])


def _num_kept(
    started: Sequence[LlmRequest],
    needs: Sequence[Sequence[int]],
    first_victim: int,
    missing: Sequence[int],
    pools: Sequence[PoolCapacity],
) -> tuple[int, Sequence[int]]:
    """How many started requests stay when ``missing`` blocks of each pool are won by pausing from
    the end.

    A pause wins what the request was charged (``needs``, of each pool) and what it holds alone.
    Stops at ``first_victim``. The second is what is then still missing (<= 0: nothing). Blocks that
    only paused requests share are not counted as won, which may pause one too many.
    """
    num_kept = len(started)
    while max(missing) > 0 and num_kept > first_victim:
        num_kept -= 1
        request_id = started[num_kept].request_id
        missing = [
            number - of_pool[num_kept] - pool.num_releasable_blocks(request_id)
            for number, of_pool, pool in zip(missing, needs, pools, strict=True)
        ]
    return num_kept, missing
