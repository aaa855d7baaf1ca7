"""RequestRecord: what the engine keeps of a request beside its LlmRequest (text, times, ...)."""

from __future__ import annotations

from inflight.api.response import RequestPerfMetrics
from inflight.batch.llm_request import LlmRequest, RequestState
from inflight.text.stream import TextStream


class RequestRecord:
    """Owned by the engine thread. Times are clock seconds; 0.0 = has not happened."""

    __slots__ = (
        "llm",
        "stream",
        "deadline",
        "log_probs",
        "cum_log_prob",
        "first_scheduled_time",
        "first_token_time",
        "last_token_time",
        "stop_reason",
        "perf",
    )

    def __init__(self, llm: LlmRequest, stream: TextStream) -> None:
        self.llm = llm
        self.stream = stream
        allotted = llm.request.allotted_time_ms
        self.deadline = None if allotted is None else llm.arrival_time + allotted / 1000
        self.log_probs: list[float] = []
        """Of generated tokens whose text is not sent yet."""
        self.cum_log_prob = 0.0
        self.first_scheduled_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.stop_reason = ""
        """What the end id or the stop word was; "" where neither ended the request."""
        self.perf: RequestPerfMetrics | None = None
        """Set when the request ends."""

    @property
    def has_ended(self) -> bool:
        return self.llm.state is RequestState.GENERATION_COMPLETE

    def token_arrived(self, now: float) -> None:
        self.first_token_time = self.first_token_time or now
        self.last_token_time = now

    def add_text(self, token_id: int, log_prob: float) -> str | None:
        """Appends a token to the stream; returns the stop word that it completed."""
        if self.llm.request.output_config.return_log_probs:
            self.log_probs.append(log_prob)
        return self.stream.append(token_id)

    def perf_metrics(self, alloc_total: int, alloc_new: int, reused: int) -> RequestPerfMetrics:
        return RequestPerfMetrics(
            arrival_time_ns=int(self.llm.arrival_time * 1e9),
            first_scheduled_time_ns=int(self.first_scheduled_time * 1e9),
            first_token_time_ns=int(self.first_token_time * 1e9),
            last_token_time_ns=int(self.last_token_time * 1e9),
            num_total_allocated_blocks=alloc_total,
            num_new_allocated_blocks=alloc_new,
            num_reused_blocks=reused,
            num_pauses=self.llm.num_pauses,
        )
