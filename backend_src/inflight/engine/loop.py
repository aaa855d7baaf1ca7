"""IterationLoop: the only conductor. One call of ``step`` is one iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.api.response import FinishReason
from inflight.batch.plan import ScheduledBatch
from inflight.engine.book import RequestBook
from inflight.engine.inbox import Inbox
from inflight.engine.record import RequestRecord
from inflight.engine.responder import Responder
from inflight.engine.statistics import StatsRecorder
from inflight.errors import IntegrityError, RequestError, RequestFailedError
from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.manager import KvCacheManager
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner
from inflight.sampling.sampler import SampledTokens, Sampler
from inflight.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What the loop conducts; each part owns its own facts."""

    scheduler: Scheduler
    kv: KvCacheManager
    packer: Packer
    runner: ModelRunner
    sampler: Sampler
    inbox: Inbox
    responder: Responder
    stats: StatsRecorder


class IterationLoop:
    """Runs on one thread. Decides (the scheduler's frozen plan), then does.

    Radii: a fault while a batch is computed ends the requests of that batch with an error; any
    other exception that leaves ``step`` is the engine's end, and its caller fails everybody.
    """

    def __init__(self, parts: EngineParts, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._iteration = 0
        self.book = RequestBook()

    @property
    def has_work(self) -> bool:
        return len(self.book) > 0 or self._parts.inbox.num_new > 0

    def step(self) -> bool:
        """One iteration; False when there was nothing to compute."""
        parts = self._parts
        began = self._clock()
        self._take_in(began)
        plan = parts.scheduler.schedule(
            self._iteration, self.book.started, self.book.waiting, parts.kv
        )
        for request in plan.paused:
            parts.kv.release(request.request_id)
            self.book.pause(request)
        if plan.is_empty:
            self._check_liveness(plan)
            parts.responder.flush()
            return False
        extents = _extents(plan)
        self._start(plan, began)
        try:
            parts.kv.reserve(extents)
            sampled = self._compute(plan)
        except Exception as error:  # whatever it is, its radius is this batch
            self._fail(plan, error)
            return True
        self._commit(plan, extents)
        num_generated = self._accept(plan, sampled)
        parts.responder.flush()
        parts.stats.record(
            plan,
            self.book,
            parts.kv,
            began=began,
            ended=self._clock(),
            num_generated=num_generated,
        )
        self._iteration += 1
        return True

    def end_everyone(self, make_error: Callable[[], RequestError]) -> None:
        """Shutdown: all requests, taken in or not, end with an error; their blocks go back."""
        self._take_in_new()
        for record in self.book:
            self._parts.kv.close(record.llm.request_id)
        self.fail_everyone(make_error)

    def fail_everyone(self, make_error: Callable[[], RequestError]) -> None:
        """As ``end_everyone``, for an engine whose books may be wrong: no KV block is touched."""
        for record in self._parts.inbox.take_new():
            self.book.admit(record)
        for record in self.book:
            self._drop(record, FinishReason.CANCELLED)
            self._parts.responder.error(record, make_error())
        self._parts.responder.flush()

    def _take_in(self, now: float) -> None:
        """New requests join the queue; cancelled and overdue ones end."""
        self._end_cancelled()
        self._take_in_new()
        for record in self.book.overdue(now):
            self._finish(record, FinishReason.TIMED_OUT)

    def _take_in_new(self) -> None:
        taken = self._parts.inbox.take_new()
        for record in taken:
            llm = record.llm
            self._parts.kv.open(llm.request_id, llm.request.cache_salt)
            self._parts.sampler.add(llm)
            self.book.admit(record)
        self._parts.stats.count_new(len(taken))

    def _end_cancelled(self) -> None:
        """A cancellation may overtake its request, which is then still in the inbox: take it in."""
        cancelled = self._parts.inbox.take_cancelled()
        if cancelled:
            self._take_in_new()
        for request_id in cancelled:
            record = self.book.get(request_id)
            if record is not None:
                self._finish(record, FinishReason.CANCELLED)

    def _start(self, plan: ScheduledBatch, now: float) -> None:
        for chunk in plan.context:
            if not chunk.request.is_started:
                record = self.book.record_of(chunk.request)
                record.first_scheduled_time = record.first_scheduled_time or now
                self.book.start(chunk.request)

    def _compute(self, plan: ScheduledBatch) -> SampledTokens:
        parts = self._parts
        inputs = parts.packer.pack(plan, parts.kv.block_table)
        output = parts.runner.forward(inputs)
        rows = [chunk.request for chunk in plan.chunks if chunk.samples]
        return parts.sampler.sample(rows, output.logits)

    def _commit(self, plan: ScheduledBatch, extents: Sequence[KvExtent]) -> None:
        """The KV of the plan is written: full blocks become reusable, positions move on."""
        self._parts.kv.commit(extents)
        for chunk in plan.chunks:
            chunk.request.advance(chunk.start, chunk.num_tokens)

    def _accept(self, plan: ScheduledBatch, sampled: SampledTokens) -> int:
        """Gives each sampled token to its request; returns how many were taken.

        Requests cancelled while the batch was computed end first: none of its tokens reach them.
        """
        self._end_cancelled()
        now = self._clock()
        rows = [chunk.request for chunk in plan.chunks if chunk.samples]
        token_ids, log_probs = sampled.token_ids.tolist(), sampled.log_probs.tolist()
        num_taken = 0
        for llm, token_id, log_prob in zip(rows, token_ids, log_probs, strict=True):
            record = self.book.get(llm.request_id)
            if record is not None:
                num_taken += 1
                self._accept_token(record, token_id, log_prob, now)
        return num_taken

    def _accept_token(
        self, record: RequestRecord, token_id: int, log_prob: float, now: float
    ) -> None:
        llm = record.llm
        if token_id in llm.end_ids:
            record.stop_reason = str(token_id)
            self._finish(record, FinishReason.END_ID)
            return
        llm.append(token_id)
        record.token_arrived(log_prob, now)
        stop_word = record.stream.append(token_id)
        if stop_word is not None:
            record.stop_reason = stop_word
            self._finish(record, FinishReason.STOP_WORDS)
        elif llm.num_tokens >= llm.max_total_tokens:
            self._finish(record, FinishReason.LENGTH)
        else:
            self._parts.responder.delta(record, self._iteration)

    def _finish(self, record: RequestRecord, reason: FinishReason) -> None:
        """A regular end, whatever the reason: the final response, and everything given back."""
        counts = self._parts.kv.request_counts(record.llm.request_id)
        perf = record.perf_metrics(counts.alloc_total, counts.alloc_new, counts.reused)
        self._parts.responder.final(record, self._iteration, reason, perf)
        self._parts.kv.close(record.llm.request_id)
        self._drop(record, reason)
        self._parts.stats.count_completed()

    def _fail(self, plan: ScheduledBatch, error: Exception) -> None:
        """The batch's radius: its requests end with an error, everyone else goes on."""
        logger.error(
            "iteration %d failed (%d requests): %s",
            plan.iteration,
            plan.num_chunks,
            type(error).__name__,
            exc_info=error,
        )
        self._end_cancelled()
        for chunk in plan.chunks:
            record = self.book.get(chunk.request.request_id)
            if record is None:
                continue
            self._parts.kv.close(record.llm.request_id)
            self._drop(record, FinishReason.NOT_FINISHED)
            message = "the server failed while it computed this request; it may be sent again"
            self._parts.responder.error(record, RequestFailedError(message))
        self._parts.responder.flush()
        self._iteration += 1

    def _drop(self, record: RequestRecord, reason: FinishReason) -> None:
        self.book.remove(record)
        self._parts.sampler.remove(record.llm.request_id)
        record.llm.finish(reason)

    def _check_liveness(self, plan: ScheduledBatch) -> None:
        """Requests wait, none runs, none was paused just now: nothing would ever change."""
        if self.book.waiting and not self.book.started and not plan.paused:
            raise IntegrityError(f"{len(self.book.waiting)} requests wait and none can start")


def _extents(plan: ScheduledBatch) -> list[KvExtent]:
    return [
        KvExtent(chunk.request.request_id, chunk.start, chunk.request.token_ids[: chunk.end])
        for chunk in plan.chunks
    ]
