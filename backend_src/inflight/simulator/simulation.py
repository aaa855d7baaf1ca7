"""Simulation: a trace through the engine's own scheduler and KV books, on a clock of its own."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence

from inflight.api import ExecutorConfig, FinishReason, Request
from inflight.api.kv_pools import ALL_LAYERS, KvGroup
from inflight.batch import LlmRequest, ScheduledBatch
from inflight.engine.admission import EngineLimits, check_request
from inflight.engine.onboarder import Onboarder
from inflight.engine.pools import PoolDivision
from inflight.errors import IntegrityError, RequestError
from inflight.kv_cache import KvCache, KvCacheManager, KvExtent, make_kv_cache
from inflight.scheduler import Scheduler, WaitingQueue, rank_key, rank_of
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator.arrivals import Arrivals
from inflight.simulator.clock import SimulatedClock
from inflight.simulator.cost_model import CostModel
from inflight.simulator.meter import Meter
from inflight.simulator.outcome import Outcome
from inflight.simulator.tiers import SimulatedTiers, TierSpeeds
from inflight.simulator.trace import VOCAB_SIZE, TraceRequest, prompt_ids

_PRIORITY = 0.5


class Simulation:
    """One run of one configuration. The clock moves by what the cost model says.

    It is ``engine.loop.IterationLoop`` without what only a model's answer needs: packing, sampling,
    text and responses, which take most of that loop's time. What decides stays: the scheduler, the
    KV cache with its reuse tree, the limits of admission, and the order of an iteration.

    A request ends when it has its output length. Nothing is drawn: equal inputs, equal outcomes,
    but for ``wall_seconds``.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        cost: CostModel,
        *,
        num_blocks: int,
        groups: Sequence[KvGroup] = (ALL_LAYERS,),
        tier_speeds: TierSpeeds | None = None,
    ) -> None:
        """``num_blocks``: of the KV pool, whatever ``config`` says of it; >= 1. ``groups``: of the
        layers, where some have a sliding window; then ``num_blocks`` are those of the first pool,
        and the others are as large as beside it in the engine. ``tier_speeds``: needed where
        ``config`` has KV tiers. Raises ConfigError where a tier holds no block."""
        self._config = config
        self._cost = cost
        self._clock = SimulatedClock()
        kv_config = config.kv_cache_config
        self._tiers: SimulatedTiers | None = None
        if kv_config.tiers.exist:
            assert tier_speeds is not None
            self._tiers = SimulatedTiers(kv_config, tier_speeds, self._clock)
        pools = PoolDivision(config, groups).pools(num_blocks)
        observers = [self._tiers.kv_tiers] if self._tiers else []
        self._kv: KvCache = make_kv_cache(pools, kv_config, clock=self._clock, observers=observers)
        self._onboarder: Onboarder | None = None
        if self._tiers is not None:
            assert isinstance(self._kv, KvCacheManager), "with tiers all layers share a pool"
            self._onboarder = Onboarder(self._tiers.kv_tiers, self._kv, config, None)
        self._limits = EngineLimits.of(config, vocab_size=VOCAB_SIZE, pools=pools)
        self._scheduler = Scheduler(
            config.scheduler_config,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            enable_chunked_context=config.enable_chunked_context,
        )
        self._iteration = 0
        self._num_arrived = 0
        self._arrived: deque[tuple[int, float, TraceRequest]] = deque()
        """(number, arrival, request) of those that wait behind ``_waiting``. The scheduler never
        looks that far, so their token ids, which are large, are not made yet."""
        self._waiting = WaitingQueue()
        self._started: list[LlmRequest] = []
        """In rank order."""
        kv_tiers = self._tiers.kv_tiers if self._tiers else None
        self._meter = Meter(config, self._kv, kv_tiers)

    def run(self, arrivals: Arrivals) -> Outcome:
        """Until every request of ``arrivals`` has ended; once a Simulation.

        Requests beyond a limit of ``config`` are refused, as the engine refuses them, and counted.
        Raises IntegrityError where the books do not add up or nobody can go on: a bug of ours.
        """
        began = time.perf_counter()
        while self._take_in(arrivals):
            self._iterate()
        self._kv.check_integrity()
        if self._kv.num_free_blocks != self._kv.num_blocks:
            raise IntegrityError("blocks are held after every request has ended")
        return self._meter.outcome(self._clock.now, time.perf_counter() - began)

    @property
    def _num_in_engine(self) -> int:
        return len(self._arrived) + len(self._waiting) + len(self._started)

    def _take_in(self, arrivals: Arrivals) -> bool:
        """Who has arrived joins the queue; False when nobody is left to compute."""
        while True:
            at = arrivals.next_arrival(self._clock.now, self._num_in_engine)
            if at is not None and (at <= self._clock.now or not self._num_in_engine):
                self._clock.now = max(self._clock.now, at)
                self._num_arrived += 1
                self._arrived.append((self._num_arrived, at, arrivals.take()))
                continue
            if self._arrived and len(self._waiting) < self._config.max_batch_size:
                self._queue(*self._arrived.popleft())
                continue  # one that was refused may let the next one arrive
            return self._num_in_engine > 0

    def _queue(self, number: int, arrival: float, traced: TraceRequest) -> None:
        request = Request(
            input_token_ids=prompt_ids(traced, number),
            max_tokens=traced.output_length,
            priority=_PRIORITY,
            end_ids=(),
        )
        try:
            check_request(request, self._limits)
        except RequestError as error:
            self._meter.refused(str(error))
            return
        aging = self._config.scheduler_config.priority_aging_seconds
        rank = rank_of(arrival, _PRIORITY, aging)
        llm = LlmRequest(number, request, arrival_time=arrival, rank=rank, end_ids=(), seed=0)
        self._kv.open(number)
        self._waiting.push(llm)

    def _iterate(self) -> None:
        """One iteration, in the order of IterationLoop."""
        began = self._clock.now
        plan = self._scheduler.schedule(
            self._iteration, self._started, self._ready_to_start(), self._kv
        )
        for llm in plan.paused:
            self._pause(llm)
        if plan.is_empty:
            waits = self._onboarder is not None and self._onboarder.wait()
            if not waits and not plan.paused:
                raise IntegrityError(f"{self._num_in_engine} requests and none can go on")
            return
        self._iteration += 1
        for chunk in plan.context:
            if not chunk.request.is_started:
                self._start(chunk.request, chunk.start)
        extents = _extents(plan)
        self._kv.reserve(extents)
        shape = IterationShape.of(plan)
        self._clock.now += self._cost.seconds(shape)
        self._kv.commit(extents)
        seconds = self._clock.now - began
        self._scheduler.observe(plan, seconds)
        if self._onboarder is not None:
            self._onboarder.observe(plan, seconds)
        ended = self._advance(plan)
        num_waiting = len(self._waiting) + len(self._arrived)
        self._meter.iteration(plan, self._started, num_waiting, self._clock.now, seconds)
        self._end(ended)

    def _ready_to_start(self) -> Collection[LlmRequest]:
        """Who may start: with tiers, whoever waits for no disk. That may take time."""
        if self._onboarder is None or self._tiers is None:
            return self._waiting
        self._tiers.settle()
        return self._onboarder.ready_to_start(self._waiting, len(self._started))

    def _advance(self, plan: ScheduledBatch) -> list[LlmRequest]:
        """Positions move on, and each row that samples has a token; returns who has its last."""
        ended = []
        now, count_token = self._clock.now, self._meter.token
        for llm, _, start, num_tokens, samples in plan.chunks:
            llm.advance(start, num_tokens)
            if samples:
                llm.append(llm.request_id % VOCAB_SIZE)
                count_token(llm, now)
                if llm.num_tokens == llm.max_total_tokens:
                    ended.append(llm)
        return ended

    def _end(self, ended: Sequence[LlmRequest]) -> None:
        for llm in ended:
            self._unstart(llm)
            self._kv.close(llm.request_id)
            llm.finish(FinishReason.LENGTH)
            self._meter.ended(llm, self._clock.now)

    def _start(self, llm: LlmRequest, num_reused: int) -> None:
        self._waiting.remove(llm)
        insort(self._started, llm, key=rank_key)
        self._meter.started(num_reused)

    def _pause(self, llm: LlmRequest) -> None:
        self._kv.release(llm.request_id)
        self._unstart(llm)
        llm.pause()
        self._waiting.push(llm)

    def _unstart(self, llm: LlmRequest) -> None:
        at = bisect_left(self._started, rank_key(llm), key=rank_key)
        assert self._started[at] is llm
        del self._started[at]


def _extents(plan: ScheduledBatch) -> list[KvExtent]:
    extents = [
        KvExtent(request.request_id, start, request.token_ids[: start + num_tokens])
        for request, _, start, num_tokens, _ in plan.context
    ]
    # A generation ends where its tokens do; there is nothing to cut off.
    extents += [
        KvExtent(request.request_id, start, request.token_ids)
        for request, _, start, _, _ in plan.generation
    ]
    return extents
