"""LlmService: what ``inflight_llm``'s model.py calls; from a Triton request to its reply."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from inflight.api.config import InflightConfig
from inflight.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    ShuttingDownError,
)
from inflight.observability import log
from inflight.tritonserver.backlog import Backlog
from inflight.tritonserver.in_flight import InFlight, TritonRequest
from inflight.tritonserver.metrics import MetricsReporter, TritonMetrics
from inflight.tritonserver.orphan import exit_when_orphaned
from inflight.tritonserver.parsed import RawRequest
from inflight.tritonserver.pump import ResponsePump
from inflight.tritonserver.reply import Reply
from inflight.tritonserver.requests import build_requests, read_request
from inflight.tritonserver.responses import (
    CANCELLED_EARLY,
    error_response,
    responses_of,
    stop_response,
)
from inflight.tritonserver.shutdown_signal import call_at_shutdown_signal

if TYPE_CHECKING:
    from inflight.executor import Executor

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2
EXIT_CODE = 70
"""Of the stub process when the engine has stopped on an error (EX_SOFTWARE)."""


class LlmService:
    """Serves the requests of one model instance. All methods are thread-safe.

    Threads: Triton's own calls ``submit``; a small pool tokenizes and enqueues; the executor's
    engine thread computes; the pump sends. Whatever happens to a request, exactly one response with
    FINAL answers it.
    """

    def __init__(
        self,
        executor: Executor,
        config: InflightConfig,
        *,
        model_name: str,
        model_version: str,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Takes over ``executor``: closes it in the end. ``exit_process`` ends this process at once
        when the engine has failed: the supervisor watches for that and restarts the server."""
        self._executor = executor
        # The limit that the engine really has, so that a default max_tokens respects it.
        self._config = config.model_copy(update={"max_seq_len": executor.config.max_seq_len})
        self._exit_process = exit_process
        self._in_flight = InFlight(executor)
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="inflight-tokenizer")
        reporter = MetricsReporter(
            executor,
            self._in_flight,
            TritonMetrics(model_name, model_version),
            config.stats_check_period_ms / 1000,
        )
        self._metrics = reporter.metrics
        self._backlog = Backlog()
        self._pump = ResponsePump(
            executor, self._in_flight, config, reporter, on_engine_failure=self._end_process
        )
        self._pump.start()

    @classmethod
    def start(
        cls, parameters: Mapping[str, str], model_name: str, model_version: str
    ) -> LlmService:
        """Reads the configuration, loads the model, starts every thread.

        ``parameters``: of Triton's model configuration, as plain strings. Raises ConfigError or
        CheckpointError that say what is wrong.
        """
        from inflight.executor import Executor

        exit_when_orphaned()
        config = InflightConfig.load(parameters=parameters)
        log.configure(config.log_level)
        executor = Executor.from_checkpoint(config.model_dir, config)
        service = cls(executor, config, model_name=model_name, model_version=model_version)
        call_at_shutdown_signal(service.close)
        return service

    def submit(self, pb_request: Any) -> None:
        """Takes one request from ``execute``; returns at once and never raises."""
        try:
            reply = Reply(pb_request.get_response_sender())
        except Exception as error:  # nobody is left to answer
            logger.error("a request came without a response sender", exc_info=error)
            return
        try:
            raw = read_request(pb_request)
            if raw.stop:
                self._stop(raw, reply)
            else:
                self._open(raw, reply)
        except Exception as error:
            self._refuse(reply, error)

    def close(self) -> None:
        """Every request in flight gets its final response; then all threads end. Safe to repeat."""
        error = ShuttingDownError("the server is shutting down")
        self._stop_taking(error)
        self._executor.shutdown()
        self._pump.stop()
        self._end_all(self._in_flight.requests(), error)

    def _stop(self, raw: RawRequest, reply: Reply) -> None:
        """Cancels the request of the same id, wherever it is; an unknown id has ended already."""
        if not raw.triton_request_id:
            raise InvalidRequestError(
                "id", "", "is empty: a stop request needs the request id of the one that it stops"
            )
        self._in_flight.cancel_by_id(raw.triton_request_id)
        reply.finish(stop_response(raw.requested_outputs))

    def _open(self, raw: RawRequest, reply: Reply) -> None:
        assert raw.door is not None, "only a stop request has no door"
        request = TritonRequest(raw, raw.door, reply)
        self._in_flight.open(request)
        try:
            self._backlog.enter(raw)
        except QueueFullError:
            self._in_flight.end(request)
            raise
        try:
            self._pool.submit(self._tokenize_and_enqueue, request, raw)
        except RuntimeError:  # the pool has just been shut down
            self._in_flight.end(request)
            raise ShuttingDownError("the server is shutting down") from None

    def _tokenize_and_enqueue(self, request: TritonRequest, raw: RawRequest) -> None:
        """In the pool. A stop or a cancellation may come at any moment, also before this."""
        try:
            self._backlog.leave(raw)
            if request.cancelled:
                self._answer_cancelled(request)
                return
            parsed = build_requests(raw, self._executor.tokenizer, self._config)
            assert len(parsed.requests) == request.shape.num_elements > 0
            if not self._in_flight.enqueue(request, parsed.requests):
                self._answer_cancelled(request)
                return
            self._metrics.request_accepted(
                sum(len(each.input_token_ids) for each in parsed.requests)
            )
        except Exception as error:
            self._in_flight.end(request)
            self._refuse(request.reply, error)

    def _answer_cancelled(self, request: TritonRequest) -> None:
        shape = request.shape
        self._in_flight.end(request)
        self._metrics.requests_cancelled(shape.num_elements)
        responses = [
            response
            for batch_index in range(shape.num_elements)
            for response in responses_of(CANCELLED_EARLY, shape, batch_index)
        ]
        for response in responses[:-1]:
            request.reply.send(response)
        request.reply.finish(responses[-1])

    def _refuse(self, reply: Reply, error: Exception) -> None:
        """``error`` before the engine took the request; ours are told, others only logged."""
        if not isinstance(error, RequestError):
            logger.error("a request could not be taken", exc_info=error)
            error = RequestFailedError("the server failed while it read this request")
        self._metrics.request_rejected(error)
        reply.finish(error_response(error))

    def _stop_taking(self, error: RequestError) -> None:
        """No new requests; those that the executor has not taken are answered with ``error``."""
        self._in_flight.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._end_all([each for each in self._in_flight.requests() if not each.engine_ids], error)

    def _end_all(self, requests: Sequence[TritonRequest], error: RequestError) -> None:
        for request in requests:
            self._in_flight.end(request)
            request.reply.finish(error_response(error))

    def _end_process(self) -> None:
        """On the pump's thread, when the engine has stopped on an error."""
        error = RequestFailedError("the engine stopped on an error")
        self._stop_taking(error)
        self._end_all(self._in_flight.requests(), error)
        logger.critical("the engine stopped on an error: ending this process with %d", EXIT_CODE)
        self._exit_process(EXIT_CODE)
