"""A Scheduler in a loop that applies its plans to a FakeCapacity: an engine without a model."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from inflight.api import CapacitySchedulerPolicy, FinishReason, Request, SchedulerConfig
from inflight.api import ContextChunkingPolicy as Chunking
from inflight.batch import LlmRequest, RequestState, ScheduledBatch
from inflight.scheduler import KvCapacity, Scheduler, WaitingQueue, rank_key, rank_of
from tests.fakes.fake_capacity import FakeCapacity

AGING_SECONDS = 60.0


def make_request(
    request_id: int,
    prompt: int | Sequence[int],
    max_tokens: int = 1,
    *,
    priority: float = 0.5,
    arrival_time: float = 0.0,
) -> LlmRequest:
    """``prompt``: the tokens, or how many (then nobody else has the same)."""
    if isinstance(prompt, int):
        prompt = [request_id * 100_000 + 10 + position for position in range(prompt)]
    return LlmRequest(
        request_id,
        Request(input_token_ids=tuple(prompt), max_tokens=max_tokens, priority=priority),
        arrival_time=arrival_time,
        rank=rank_of(arrival_time, priority, AGING_SECONDS),
        end_ids=(),
        seed=0,
    )


def make_scheduler(
    policy: CapacitySchedulerPolicy,
    *,
    max_batch_size: int = 8,
    max_num_tokens: int = 64,
    chunking: Chunking | None = Chunking.FIRST_COME_FIRST_SERVED,
) -> Scheduler:
    """``chunking`` None: contexts are not chunked."""
    return Scheduler(
        SchedulerConfig(
            capacity_scheduler_policy=policy,
            context_chunking_policy=chunking or Chunking.FIRST_COME_FIRST_SERVED,
            priority_aging_seconds=AGING_SECONDS,
        ),
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        enable_chunked_context=chunking is not None,
    )


def start(request: LlmRequest, kv: FakeCapacity, num_computed: int) -> LlmRequest:
    """Brings a queued request to the state where ``num_computed`` context tokens are computed; a
    whole context yields its first token."""
    kv.reserve([(request.request_id, 0, request.token_ids[:num_computed])])
    kv.commit(request.request_id, request.token_ids[:num_computed])
    request.advance(0, num_computed)
    if request.in_generation:
        request.append(0)
    return request


def forked(request: LlmRequest, child_id: int) -> LlmRequest:
    """One that has generated what ``request``, in its generation phase, has."""
    tokens, prompt_length = request.token_ids.tolist(), request.prompt_length
    child = make_request(
        child_id,
        tokens[:prompt_length],
        request.request.max_tokens,
        priority=request.request.priority,
        arrival_time=request.arrival_time,
    )
    child.advance(0, prompt_length)
    for position, token in enumerate(tokens[prompt_length:], prompt_length):
        if position > prompt_length:
            child.advance(position - 1, 1)
        child.append(token)
    return child


class SimulatedEngine:
    def __init__(self, scheduler: Scheduler, kv: FakeCapacity) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.waiting = WaitingQueue()
        self.started: list[LlmRequest] = []
        self.finished: list[LlmRequest] = []
        self.iteration = 0

    @property
    def has_work(self) -> bool:
        return bool(self.started) or len(self.waiting) > 0

    def plan(self, kv: KvCapacity | None = None) -> ScheduledBatch:
        return self.scheduler.schedule(
            self.iteration, self.started, self.waiting, self.kv if kv is None else kv
        )

    def apply(self, plan: ScheduledBatch) -> None:
        for request in plan.paused:
            self.started.remove(request)
            self.kv.release(request.request_id)
            request.pause()
            self.waiting.push(request)
        self.kv.reserve(
            [(c.request.request_id, c.start, c.request.token_ids[: c.end]) for c in plan.chunks]
        )
        for chunk in plan.chunks:
            request = chunk.request
            if request.state is RequestState.QUEUED:
                self.waiting.remove(request)
                insort(self.started, request, key=rank_key)
            request.advance(chunk.start, chunk.num_tokens)
            self.kv.commit(request.request_id, request.token_ids[: chunk.end])
            if chunk.samples:
                request.append(request.num_tokens % 3)
                if request.num_tokens == request.max_total_tokens:
                    self.end(request, FinishReason.LENGTH)
        self.kv.check_integrity()
        self.iteration += 1

    def end(self, request: LlmRequest, reason: FinishReason) -> None:
        """Retires a request, started or queued."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.started.remove(request)
            self.kv.release(request.request_id)
        request.finish(reason)
        self.finished.append(request)

    def step(self) -> ScheduledBatch:
        plan = self.plan()
        self.apply(plan)
        return plan
