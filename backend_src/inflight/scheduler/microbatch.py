"""Stage 2, micro-batch: which tokens of the requests that may run are computed in this iteration.

Generations come first in the token budget, one token each, so a long context never holds up the
streams that run; contexts share what is left. Tokens that are reused are not computed and cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.api import ContextChunkingPolicy
from inflight.batch import LlmRequest, Phase, RequestState, ScheduledChunk
from inflight.scheduler.capacity import CapacityPlan
from inflight.scheduler.latency_target import LatencyTarget
from inflight.scheduler.waiting_queue import rank_key

ShareTokens = Callable[[Sequence[int], int, int], list[int]]
"""(remaining context tokens of each request in rank order, token budget, unit) -> the tokens each
gets, 0 = none. Their sum keeps to the budget, and one that is cut gets whole units."""


def share_whole(remaining: Sequence[int], budget: int, unit: int) -> list[int]:
    """Without chunking: whole contexts, in order, up to the first that does not fit."""
    shares = [0] * len(remaining)
    for index, wanted in enumerate(remaining):
        if wanted > budget:
            break
        shares[index] = wanted
        budget -= wanted
    return shares


def share_first_come_first_served(remaining: Sequence[int], budget: int, unit: int) -> list[int]:
    """Each in order takes all it wants; one that is cut gets the whole units that are left."""
    shares = []
    for wanted in remaining:
        share = wanted if wanted <= budget else budget - budget % unit
        shares.append(share)
        budget -= share
    return shares


def share_equal_progress(remaining: Sequence[int], budget: int, unit: int) -> list[int]:
    """Rounds of one more unit for each, in order, until the budget or the contexts are used up.

    The last tokens of a context may be less than a unit.
    """
    shares = [0] * len(remaining)
    unfinished = list(range(len(remaining)))
    while unfinished:
        next_round = []
        for index in unfinished:
            more = min(unit, remaining[index] - shares[index])
            if more <= budget:
                budget -= more
                shares[index] += more
                if shares[index] < remaining[index]:
                    next_round.append(index)
        unfinished = next_round
    return shares


_CHUNKING: dict[ContextChunkingPolicy, ShareTokens] = {
    ContextChunkingPolicy.FIRST_COME_FIRST_SERVED: share_first_come_first_served,
    ContextChunkingPolicy.EQUAL_PROGRESS: share_equal_progress,
}


class MicroBatchScheduler:
    """Cuts a capacity plan to ``max_batch_size`` rows and ``max_num_tokens`` computed tokens.

    ``chunking`` None: contexts are not chunked; each is computed whole in one iteration. ``target``
    bounds the context tokens further while there are generations.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int,
        chunking: ContextChunkingPolicy | None,
        target: LatencyTarget | None = None,
    ) -> None:
        assert chunking is not None or target is None
        self._target = target
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._share = share_whole if chunking is None else _CHUNKING[chunking]

    def schedule(
        self, plan: CapacityPlan, tokens_per_block: int
    ) -> tuple[tuple[ScheduledChunk, ...], tuple[ScheduledChunk, ...]]:
        """The context chunks, those that finish their context last, and the generation chunks.

        Inside these groups requests keep rank order. A request of the plan without a chunk gets no
        tokens in this iteration.
        """
        generation_state, generation_phase = RequestState.GENERATION_IN_PROGRESS, Phase.GENERATION
        generation: list[ScheduledChunk] = []
        contexts: list[tuple[LlmRequest, int]] = []
        for request in plan.started:
            position = request.context_position
            if request.state is generation_state:
                chunk = ScheduledChunk(request, generation_phase, position, 1, True)
                generation.append(chunk)
            else:
                contexts.append((request, position))
        contexts += [(request, match.num_tokens) for request, match in plan.admitted]
        del generation[min(self._max_batch_size, self._max_num_tokens) :]
        if not contexts:
            return (), tuple(generation)
        contexts.sort(key=lambda context: rank_key(context[0]))
        del contexts[self._max_batch_size - len(generation) :]
        budget, unit = self._max_num_tokens - len(generation), tokens_per_block
        if self._target is not None and generation:
            start = max(start for _, start in contexts)
            affordable = self._target.context_tokens(generation, start)
            budget, unit = min(budget, affordable), min(unit, affordable)
        return self._context_chunks(contexts, budget, unit), tuple(generation)

    def _context_chunks(
        self, contexts: Sequence[tuple[LlmRequest, int]], budget: int, unit: int
    ) -> tuple[ScheduledChunk, ...]:
        """Chunks of (request, start) pairs in rank order; those that finish a context last."""
        remaining = [request.context_length - start for request, start in contexts]
        shares = self._share(remaining, budget, unit)
        unfinished, finishing = [], []
        for (request, start), wanted, share in zip(contexts, remaining, shares, strict=True):
            if share == wanted:
                finishing.append(ScheduledChunk(request, Phase.CONTEXT, start, share, True))
            elif share:
                unfinished.append(ScheduledChunk(request, Phase.CONTEXT, start, share, False))
        return (*unfinished, *finishing)
