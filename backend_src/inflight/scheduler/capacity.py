"""Stage 1, capacity: which requests may hold KV blocks in this iteration, and who is paused.

A policy reads the requests and the KV cache's counts, and changes neither. It keeps its books in
blocks, starting from the blocks that are free now:

- A started request's blocks are held, so only what it needs beyond them is charged.
- A queued request is charged all its blocks but those it would share with a started request
  (``PrefixMatch.num_referenced_blocks``). Its other reusable blocks count as free, so taking them
  costs as much as taking empty ones.
- Two queued requests that share a prefix are both charged for it. The books thus err only by
  counting too few blocks as free; what a plan admits, ``reserve`` can serve.

A request whose ``max_total_tokens`` exceed the pool is refused when it is enqueued; the policies
rely on that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from inflight.api.kv import PrefixMatch
from inflight.batch import LlmRequest, RequestState
from inflight.scheduler.ports import KvCapacity
from inflight.scheduler.waiting_queue import rank_key


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

    Every started request keeps the right to ceil(max_total_tokens / tokens_per_block) blocks. The
    queue is served strictly in order: the first request that does not fit holds back all behind it,
    so that small requests cannot starve a large one.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        candidates = _candidates(waiting, self._max_batch_size - len(started))
        if not candidates:
            return CapacityPlan(started)
        tokens_per_block = kv.tokens_per_block
        free = kv.num_free_blocks - sum(
            blocks_for(request.max_total_tokens, tokens_per_block)
            - kv.num_held_blocks(request.request_id)
            for request in started
        )
        admitted: list[AdmittedRequest] = []
        for request in candidates:
            total = blocks_for(request.max_total_tokens, tokens_per_block)
            match = kv.match_prefix(request.request_id, request.token_ids)
            free -= total - match.num_referenced_blocks
            if free < 0:
                break
            admitted.append(AdmittedRequest(request, match))
        return CapacityPlan(started, admitted)


class StaticBatch:
    """The baseline: a batch chosen by GuaranteedNoEvict's arithmetic runs until it has drained.

    The slots of its finished requests stay empty, and the next batch is chosen when nothing of this
    one is left. When the contexts of a batch exceed ``max_num_tokens`` it takes several iterations
    to start; the policy remembers which of the chosen requests still wait, its only state.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._no_evict = GuaranteedNoEvict(max_batch_size)
        self._joining: frozenset[int] = frozenset()

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        joining = [r for r in waiting if r.request_id in self._joining] if self._joining else []
        has_drained = not started and not joining
        plan = self._no_evict.schedule(started, waiting if has_drained else joining, kv)
        self._joining = frozenset(request.request_id for request, _ in plan.admitted)
        return plan


class MaxUtilization:
    """Charges every request for one step only; pauses the last in rank when blocks run out.

    One step of a request computes its uncomputed tokens, at most ``max_num_tokens`` (exactly one in
    the generation phase), and needs ceil(end of the step / tokens_per_block) blocks less those it
    holds.

    A pass either pauses or admits, never both: the blocks of a paused request may be the very ones
    that an admitted one would share, so the next pass counts what really came free. Requests are
    paused from the end of rank order,

    - when the started ones cannot all go on: never the first, which alone in the pool always fits;
    - or when the first of the queue does not fit, has never been paused and ranks before them: only
      if that makes enough room for it.

    Nobody is paused because ``max_batch_size`` requests are started. A request that was paused
    comes back only when its whole context fits and leaves the others room to go on (``_headroom``);
    otherwise it would soon be paused again.
    """

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens

    def schedule(
        self, started: Sequence[LlmRequest], waiting: Iterable[LlmRequest], kv: KvCapacity
    ) -> CapacityPlan:
        needs = self._step_needs(started, kv)
        free = kv.num_free_blocks - sum(needs)
        if free < 0:
            num_kept, _ = _num_kept(started, needs, 1, -free, kv)
            return CapacityPlan(started[:num_kept], paused=started[num_kept:])
        candidates = _candidates(waiting, self._max_batch_size - len(started))
        is_anyone_back = any(request.num_pauses for request in candidates)
        headroom = _headroom(started, needs, kv) if is_anyone_back else 0
        admitted: list[AdmittedRequest] = []
        for request in candidates:
            match = kv.match_prefix(request.request_id, request.token_ids)
            need, rest = self._context_needs(request, match, kv.tokens_per_block)
            wanted = need + rest + headroom if request.num_pauses else need
            if wanted > free:
                if not admitted and not request.num_pauses:
                    return _make_room(request, need - free, started, needs, kv)
                break
            free -= need
            headroom += max(1, rest)
            admitted.append(AdmittedRequest(request, match))
        return CapacityPlan(started, admitted)

    def _step_needs(self, started: Sequence[LlmRequest], kv: KvCapacity) -> list[int]:
        """Blocks that the next step of each started request takes from the free ones."""
        # The rule for contexts holds for generations too; most are generations, and + 1 is faster.
        tokens_per_block, limit = kv.tokens_per_block, self._max_num_tokens
        generation = RequestState.GENERATION_IN_PROGRESS
        return [
            blocks_for(
                r.context_position + 1
                if r.state is generation
                else min(r.num_tokens, r.context_position + limit),
                tokens_per_block,
            )
            - kv.num_held_blocks(r.request_id)
            for r in started
        ]

    def _context_needs(
        self, request: LlmRequest, match: PrefixMatch, tokens_per_block: int
    ) -> tuple[int, int]:
        """Blocks a queued request takes for its first step, and for the rest of its context."""
        whole = blocks_for(request.num_tokens, tokens_per_block)
        step_end = min(request.num_tokens, match.num_tokens + self._max_num_tokens)
        step = blocks_for(step_end, tokens_per_block)
        return step - match.num_referenced_blocks, whole - step


def _candidates(waiting: Iterable[LlmRequest], num_slots: int) -> list[LlmRequest]:
    """The queued requests for which there are slots (none, if ``num_slots`` is not positive)."""
    return list(islice(waiting, max(num_slots, 0)))


def _headroom(started: Sequence[LlmRequest], needs: Sequence[int], kv: KvCapacity) -> int:
    """Blocks the started requests want after this step: the rest of a context, at least one."""
    tokens_per_block = kv.tokens_per_block
    return sum(
        max(
            1,
            blocks_for(request.num_tokens, tokens_per_block)
            - kv.num_held_blocks(request.request_id)
            - need,
        )
        for request, need in zip(started, needs, strict=True)
    )


def _make_room(
    request: LlmRequest,
    num_missing: int,
    started: Sequence[LlmRequest],
    needs: Sequence[int],
    kv: KvCapacity,
) -> CapacityPlan:
    """Pauses requests that rank after a queued one for its sake; nobody, if that is too little."""
    first_victim = bisect_right(started, rank_key(request), key=rank_key)
    num_kept, num_missing = _num_kept(started, needs, first_victim, num_missing, kv)
    if num_missing > 0:
        return CapacityPlan(started)
    return CapacityPlan(started[:num_kept], paused=started[num_kept:])


def _num_kept(
    started: Sequence[LlmRequest],
    needs: Sequence[int],
    first_victim: int,
    num_missing: int,
    kv: KvCapacity,
) -> tuple[int, int]:
    """How many started requests stay when ``num_missing`` blocks are won by pausing from the end.

    Stops at ``first_victim``. The second number is what is then still missing (<= 0: nothing).
    Blocks that only paused requests share are not counted as won, which may pause one too many.
    """
    num_kept = len(started)
    while num_missing > 0 and num_kept > first_victim:
        num_kept -= 1
        num_missing -= needs[num_kept]
        num_missing -= kv.num_releasable_blocks(started[num_kept].request_id)
    return num_kept, num_missing
