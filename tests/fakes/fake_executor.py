"""An executor whose engine is the test: it says what each request generates, and when.

Same face and same promises as ``inflight.executor.Executor``: unsent deltas of a request merge, a
cancelled request ends as CANCELLED, every request gets one final response, also at shutdown and
when the engine breaks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from inflight.api.executor_config import ExecutorConfig
from inflight.api.request import Request
from inflight.api.response import FinishReason, RequestPerfMetrics, Response, Result
from inflight.api.stats import IterationStats, KvCacheStats, KvEventStats
from inflight.errors import RequestError, RequestFailedError, ShuttingDownError


class FakeTokenizer:
    """One token for each character."""

    vocab_size = 0x110000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each) for each in ids)


class FakeExecutor:
    """Thread-safe, as the real one is."""

    def __init__(self) -> None:
        self.config = ExecutorConfig(max_seq_len=1024)
        self.tokenizer = FakeTokenizer()
        self.is_healthy = True
        self.is_shut_down = False
        self.requests: dict[int, Request] = {}
        """All requests ever enqueued, by id, in order."""
        self.cancelled: list[int] = []
        self.refuse_with: RequestError | None = None
        """Raised by the next enqueue_request calls."""
        self.num_enqueues_before_refusal = 0
        self.iteration_stats: list[IterationStats] = []
        self.kv_events: KvEventStats | None = None
        self.kv = KvCacheStats(
            max_num_blocks=100, free_num_blocks=100, used_num_blocks=0, tokens_per_block=32
        )
        self._condition = threading.Condition()
        self._open: dict[int, Request] = {}
        self._unsent: dict[int, Response] = {}

    # The face of the real one.

    def enqueue_request(self, request: Request) -> int:
        with self._condition:
            if self.is_shut_down:
                raise ShuttingDownError("the server is shutting down")
            if self.refuse_with is not None:
                if self.num_enqueues_before_refusal == 0:
                    raise self.refuse_with
                self.num_enqueues_before_refusal -= 1
            request_id = len(self.requests) + 1
            self.requests[request_id] = self._open[request_id] = request
            self._condition.notify_all()
            return request_id

    def await_responses(
        self, request_id: int | None = None, timeout: float | None = None
    ) -> list[Response]:
        assert request_id is None, "the pump awaits everybody"
        with self._condition:
            self._condition.wait_for(lambda: bool(self._unsent), timeout)
            taken, self._unsent = list(self._unsent.values()), {}
            return taken

    def cancel_request(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.finish(request_id, FinishReason.CANCELLED)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        taken, self.iteration_stats = self.iteration_stats, []
        return taken

    def kv_cache_stats(self) -> KvCacheStats:
        return self.kv

    def kv_event_stats(self) -> KvEventStats | None:
        return self.kv_events

    def shutdown(self, timeout: float = 30.0) -> None:
        self.is_shut_down = True
        self._fail_all(ShuttingDownError("the server is shutting down"))

    # The engine's side, played by the test.

    def wait_for_requests(self, number: int) -> list[int]:
        """Ids of the first ``number`` requests, once they have been enqueued."""
        with self._condition:
            arrived = self._condition.wait_for(lambda: len(self.requests) >= number, 5)
        assert arrived, f"only {len(self.requests)} of {number} requests were enqueued"
        return list(self.requests)[:number]

    def id_of(self, prompt: str) -> int:
        """The id of the request with this prompt, once it has been enqueued."""
        wanted = tuple(map(ord, prompt))

        def found() -> list[int]:
            return [i for i, each in self.requests.items() if each.input_token_ids == wanted]

        with self._condition:
            arrived = self._condition.wait_for(found, 5)
        assert arrived, f"no request with the prompt {prompt!r} was enqueued"
        return arrived[-1]

    @property
    def num_unsent(self) -> int:
        """Responses that nobody has taken yet."""
        with self._condition:
            return len(self._unsent)

    def say(self, request_id: int, *texts: str) -> None:
        """One delta for each text, as many tokens as it has characters."""
        for text in texts:
            self._put(request_id, _result(text, is_final=False))

    def finish(
        self,
        request_id: int,
        reason: FinishReason = FinishReason.LENGTH,
        *,
        text: str = "",
        stop_reason: str = "",
    ) -> None:
        """The final Result; nothing when the request has ended already."""
        with self._condition:
            if self._open.pop(request_id, None) is None:
                return
        self._put(request_id, _result(text, is_final=True, reason=reason, stop_reason=stop_reason))

    def fail(self, request_id: int, error: RequestError) -> None:
        with self._condition:
            if self._open.pop(request_id, None) is not None:
                self._unsent[request_id] = Response(request_id=request_id, error=error)
                self._condition.notify_all()

    def break_down(self) -> None:
        """An engine error: everybody fails, and the executor is unhealthy from now on."""
        self.is_healthy = False
        self._fail_all(RequestFailedError("the engine stopped on an error"))

    def _fail_all(self, error: RequestError) -> None:
        for request_id in list(self._open):
            self.fail(request_id, error)

    def _put(self, request_id: int, result: Result) -> None:
        with self._condition:
            unsent = self._unsent.get(request_id)
            if unsent is not None and unsent.result is not None:
                result = unsent.result.merged_with(result)
            self._unsent[request_id] = Response(request_id=request_id, result=result)
            self._condition.notify_all()


def _result(
    text: str,
    *,
    is_final: bool,
    reason: FinishReason = FinishReason.NOT_FINISHED,
    stop_reason: str = "",
) -> Result:
    now = time.monotonic_ns()
    return Result(
        is_final=is_final,
        text=text,
        output_token_ids=tuple(ord(char) for char in text),
        prefix_token_ids=(7, 8) if text else (),
        text_length=len(text),
        num_input_tokens=3,
        num_output_tokens=len(text),
        finish_reason=reason,
        stop_reason=stop_reason,
        log_probs=tuple(-0.5 for _ in text),
        cum_log_prob=-0.5 * len(text),
        perf_metrics=_perf(now) if is_final else None,
    )


def _perf(now: int) -> RequestPerfMetrics:
    return RequestPerfMetrics(
        arrival_time_ns=now - 3_000_000,
        first_scheduled_time_ns=now - 2_000_000,
        first_token_time_ns=now - 1_000_000,
        last_token_time_ns=now,
        num_total_allocated_blocks=5,
        num_new_allocated_blocks=4,
        num_reused_blocks=1,
    )
