"""IterationLoop: the only conductor. One call of ``step`` computes one iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from inflight.api.response import FinishReason
from inflight.batch.llm_request import LlmRequest
from inflight.batch.plan import ScheduledBatch
from inflight.engine.book import RequestBook
from inflight.engine.forward import extents_of, prepare_forward
from inflight.engine.iteration import ComputedIteration, SettledIteration
from inflight.engine.parts import EngineParts
from inflight.engine.record import RequestRecord
from inflight.errors import EngineError, IntegrityError, RequestError, RequestFailedError
from inflight.kv_cache import BlockRetention, PrefixIdentity
from inflight.sampling.sampler import SampledTokens

logger = logging.getLogger(__name__)


class IterationLoop:
    """Runs on one thread. Decides (the scheduler's frozen plan), then does.

    A step settles what the step before has computed (KV, tokens, ends), plans the next iteration
    from that, sets it going on the lane, and beside it delivers what was settled: text, stop words,
    responses, statistics. When ``step`` returns, nothing runs and everything settled is delivered.

    A stop word is thus found while the next iteration is already being computed: what that brings
    for the request is dropped, as for one that was cancelled meanwhile.

    Radii: a fault while a batch is computed ends the requests of that batch with an error; any
    other exception that leaves ``step`` is the engine's end, and its caller fails everybody.
    """

    def __init__(self, parts: EngineParts, clock: Callable[[], float]) -> None:
        self.parts = parts
        self.book = RequestBook()
        self._clock = clock
        self._iteration = 0
        self._computed: ComputedIteration | None = None
        self._tokens: list[tuple[RequestRecord, int, float]] = []
        """Settled and not delivered: a token and its log-prob."""
        self._ended: list[RequestRecord] = []
        """Ended, out of the book, and without their final response."""

    @property
    def has_work(self) -> bool:
        return len(self.book) > 0 or self.parts.inbox.num_new > 0 or self._computed is not None

    def step(self) -> bool:
        """One iteration; False when there was nothing to compute."""
        began = self._clock()
        settled = self._settle()
        self._take_in(began)
        plan = self._plan()
        if plan.is_empty:
            self._deliver(settled)
            self.parts.stats.count_pauses(plan)
            self._check_liveness(plan)
            return False
        self._iteration += 1
        self._start(plan, began)
        extents = extents_of(plan)
        try:
            self.parts.lane.start(prepare_forward(self.parts, plan, extents))
        except Exception as error:
            self._deliver(settled)
            self._fail(plan, error)
            return True
        try:
            self._deliver(settled)
        finally:
            outcome = self._wait()
        self._computed = ComputedIteration(plan, extents, outcome, began, self._clock())
        return True

    def end_everyone(self, make_error: Callable[[], RequestError]) -> None:
        """Shutdown: all requests, taken in or not, end with an error; their blocks go back."""
        self._take_in_new()
        for record in self.book:
            self.parts.kv.close(record.llm.request_id)
        self.fail_everyone(make_error)

    def fail_everyone(self, make_error: Callable[[], RequestError]) -> None:
        """As ``end_everyone``, for an engine whose books may be wrong: no KV block is touched."""
        self._computed = None
        for record in self.parts.inbox.take_new():
            self.book.admit(record)
        for record in self.book:
            self._drop(record, FinishReason.CANCELLED)
            self._ended.append(record)
        for record in self._ended:
            self.parts.responder.error(record, make_error())
        self._ended, self._tokens = [], []
        self.parts.responder.flush()

    # What must precede the next plan.

    def _settle(self) -> SettledIteration | None:
        """Brings what was computed to its requests, but for those that have ended meanwhile.

        None where nothing was, or where it failed.
        """
        computed, self._computed = self._computed, None
        if computed is not None and isinstance(computed.outcome, SampledTokens):
            self._commit(computed)
        self._end_cancelled()
        if computed is None:
            return None
        if isinstance(computed.outcome, Exception):
            self._fail(computed.plan, computed.outcome)
            return None
        seconds = computed.ended - computed.began
        # Moving KV blocks counts here: the streams wait for it, and the target is for their gaps.
        self.parts.scheduler.observe(computed.plan, seconds)
        if self.parts.onboarder is not None:
            self.parts.onboarder.observe(computed.plan, seconds)
        num_generated = self._accept(computed, computed.outcome)
        return SettledIteration(computed.plan, num_generated, computed.began, computed.ended)

    def _commit(self, computed: ComputedIteration) -> None:
        """The KV is written: full blocks become reusable, positions move on."""
        book = self.book
        self.parts.kv.commit([e for e in computed.extents if e.request_id in book])
        for chunk in computed.plan.chunks:
            if chunk.request.request_id in book:
                chunk.request.advance(chunk.start, chunk.num_tokens)

    def _accept(self, computed: ComputedIteration, sampled: SampledTokens) -> int:
        """Gives each sampled token to its request; returns how many were taken."""
        rows = [chunk.request for chunk in computed.plan.chunks if chunk.samples]
        token_ids, log_probs = sampled.token_ids.tolist(), sampled.log_probs.tolist()
        num_taken = 0
        for llm, token_id, log_prob in zip(rows, token_ids, log_probs, strict=True):
            record = self.book.get(llm.request_id)
            if record is not None:
                num_taken += 1
                self._accept_token(record, token_id, log_prob, computed.ended)
        return num_taken

    def _accept_token(
        self, record: RequestRecord, token_id: int, log_prob: float, now: float
    ) -> None:
        llm = record.llm
        if token_id in llm.end_ids:
            record.stop_reason = str(token_id)
            self._end(record, FinishReason.END_ID)
            return
        llm.append(token_id)
        record.token_arrived(now)
        if llm.num_tokens < llm.max_total_tokens:
            self._tokens.append((record, token_id, log_prob))
            return
        # It ends here, so whether by a stop word is looked at here.
        record.stop_reason = record.add_text(token_id, log_prob) or ""
        self._end(record, FinishReason.STOP_WORDS if record.stop_reason else FinishReason.LENGTH)

    def _take_in(self, now: float) -> None:
        """New requests join the queue; overdue ones end."""
        self._take_in_new()
        for record in self.book.overdue(now):
            self._end(record, FinishReason.TIMED_OUT)

    def _take_in_new(self) -> None:
        taken = self.parts.inbox.take_new()
        for record in taken:
            llm = record.llm
            self.parts.kv.open(llm.request_id, *_kv_terms(llm))
            self.parts.sampler.add(llm)
            self.book.admit(record)
        self.parts.stats.count_new(len(taken))

    def _end_cancelled(self) -> None:
        """A cancellation may overtake its request, which is then still in the inbox: take it in."""
        cancelled = self.parts.inbox.take_cancelled()
        if cancelled:
            self._take_in_new()
        for request_id in cancelled:
            record = self.book.get(request_id)
            if record is not None:
                self._end(record, FinishReason.CANCELLED)

    # The next iteration.

    def _plan(self) -> ScheduledBatch:
        """The scheduler's plan; those that it pauses have lost their blocks."""
        kv, onboarder, started = self.parts.kv, self.parts.onboarder, self.book.started
        waiting: Collection[LlmRequest] = self.book.waiting
        if onboarder is not None:
            waiting = onboarder.ready_to_start(waiting, len(started))
        plan = self.parts.scheduler.schedule(self._iteration, started, waiting, kv)
        for request in plan.paused:
            kv.release(request.request_id)
            self.book.pause(request)
        return plan

    def _start(self, plan: ScheduledBatch, now: float) -> None:
        for chunk in plan.context:
            if not chunk.request.is_started:
                record = self.book.record_of(chunk.request)
                if not record.first_scheduled_time:
                    record.first_scheduled_time = now
                    self.parts.stats.count_started(now - chunk.request.arrival_time)
                self.book.start(chunk.request)

    def _wait(self) -> SampledTokens | Exception:
        try:
            return self.parts.lane.wait()
        except EngineError:
            raise
        except Exception as error:  # whatever else it is, its radius is this batch
            return error

    # Beside it.

    def _deliver(self, settled: SettledIteration | None) -> None:
        """What the clients and the statistics hear of the settled iteration."""
        parts = self.parts
        iteration = self._iteration if settled is None else settled.plan.iteration
        for record, token_id, log_prob in self._tokens:
            stop_word = record.add_text(token_id, log_prob)
            if record.has_ended:
                continue
            if stop_word is None:
                parts.responder.delta(record, iteration)
            else:
                record.stop_reason = stop_word
                self._end(record, FinishReason.STOP_WORDS)
        self._tokens.clear()
        for record in self._ended:
            parts.responder.final(record, iteration)
        self._ended.clear()
        parts.responder.flush()
        if settled is not None:
            parts.stats.record(settled, self.book, parts.kv, parts.kv_cache_stats())

    # How requests end.

    def _end(self, record: RequestRecord, reason: FinishReason) -> None:
        """A regular end, whatever the reason: all is given back, the final response is due."""
        counts = self.parts.kv.request_counts(record.llm.request_id)
        record.perf = record.perf_metrics(counts.alloc_total, counts.alloc_new, counts.reused)
        self.parts.kv.close(record.llm.request_id)
        self._drop(record, reason)
        self._ended.append(record)
        self.parts.stats.count_completed()

    def _fail(self, plan: ScheduledBatch, error: Exception) -> None:
        """The batch's radius: its requests end with an error, everyone else goes on."""
        logger.error(
            "iteration %d failed (%d requests): %s",
            plan.iteration,
            plan.num_chunks,
            type(error).__name__,
            exc_info=error,
        )
        self.parts.stats.count_pauses(plan)
        for chunk in plan.chunks:
            record = self.book.get(chunk.request.request_id)
            if record is None:
                continue
            self.parts.kv.close(record.llm.request_id)
            self._drop(record, FinishReason.NOT_FINISHED)
            message = "the server failed while it computed this request; it may be sent again"
            self.parts.responder.error(record, RequestFailedError(message))

    def _drop(self, record: RequestRecord, reason: FinishReason) -> None:
        self.book.remove(record)
        self.parts.sampler.remove(record.llm.request_id)
        record.llm.finish(reason)

    def _check_liveness(self, plan: ScheduledBatch) -> None:
        """Requests wait, none runs, none was paused just now: nothing would ever change, unless
        one waits for its blocks."""
        if self.parts.onboarder is not None and self.parts.onboarder.wait():
            return
        if self.book.waiting and not self.book.started and not plan.paused:
            raise IntegrityError(f"{len(self.book.waiting)} requests wait and none can start")


def _kv_terms(llm: LlmRequest) -> tuple[PrefixIdentity, BlockRetention | None]:
    """What a request's blocks may be shared with, and how long they are kept."""
    retention = llm.request.kv_cache_retention_config
    return (
        PrefixIdentity(cache_salt=llm.request.cache_salt),
        None if retention is None else BlockRetention(retention, llm.prompt_length),
    )
