"""ResponsePump: the one thread that carries the engine's answers to their clients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from inflight.api.config import InflightConfig
from inflight.api.response import Response, Result
from inflight.errors import RequestError, RequestFailedError
from inflight.native.cpu import usable_cores
from inflight.tritonserver.cancellation import CancellationWatch
from inflight.tritonserver.in_flight import Element, InFlight
from inflight.tritonserver.metrics import MetricsReporter
from inflight.tritonserver.pacer import StreamPacer
from inflight.tritonserver.responses import error_response, has_data, responses_of

if TYPE_CHECKING:
    from inflight.executor import Executor

logger = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS = 0.05
"""With nothing in flight: how soon at the latest a new request's client is watched."""
DRAIN_SECONDS = 5.0
"""How long the last answers of a stopping executor are waited for."""


class ResponsePump:
    """Awaits the executor's responses and sends them, watches clients, keeps the metrics fresh.

    One thread, because sending is a round trip to the server and more threads were measured not to
    help. Its queue is the executor's outbox, which merges what is not taken: it cannot grow. A
    fault that concerns one request ends that request; any other is the engine's.
    """

    def __init__(
        self,
        executor: Executor,
        in_flight: InFlight,
        config: InflightConfig,
        reporter: MetricsReporter,
        *,
        on_engine_failure: Callable[[], None],
    ) -> None:
        """``on_engine_failure`` is called once, as the last thing the thread does, when the engine
        has stopped on an error and its last answers are out."""
        self._executor = executor
        self._in_flight = in_flight
        self._reporter = reporter
        self._metrics = reporter.metrics
        self._on_engine_failure = on_engine_failure
        self._pacer = StreamPacer(usable_cores())
        self._period = config.cancellation_check_period_ms / 1000
        self._watch = CancellationWatch(in_flight, self._period, time.monotonic)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The executor has shut down: sends what it has still said, then ends the thread."""
        self._stopping.set()
        self._thread.join(2 * DRAIN_SECONDS)

    def _run(self) -> None:
        has_failed = False
        try:
            while not self._stopping.is_set() and self._executor.is_healthy:
                self._turn()
            self._drain()
        except Exception as error:  # a bug of ours: without this thread nobody hears anything
            logger.critical("the pump stopped", exc_info=error)
            has_failed = True
        if has_failed or not self._executor.is_healthy:
            self._on_engine_failure()

    def _turn(self) -> None:
        for response in self._executor.await_responses(timeout=self._wait_seconds()):
            self._deliver(response)
        for engine_id, result in self._pacer.take_due(time.monotonic()):
            element = self._in_flight.find(engine_id)
            if element is not None:
                self._send(element, result)
        self._watch.poll()
        self._reporter.report()

    def _wait_seconds(self) -> float:
        longest = self._period if len(self._in_flight) else _IDLE_WAIT_SECONDS
        held = self._pacer.seconds_to_next(time.monotonic())
        return longest if held is None else min(longest, held)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._in_flight.num_elements and time.monotonic() < deadline:
            for response in self._executor.await_responses(timeout=_IDLE_WAIT_SECONDS):
                self._deliver(response)
        self._reporter.report()

    def _deliver(self, response: Response) -> None:
        element = self._in_flight.find(response.request_id)
        if element is None:
            return
        try:
            if response.is_final:
                self._deliver_final(response, element)
            elif response.result is not None:
                due = self._pacer.push(response.request_id, response.result, time.monotonic())
                if due is not None:
                    self._send(element, due)
        except Exception as error:  # whatever it is, its radius is this request
            logger.error("request %d could not be answered", response.request_id, exc_info=error)
            self._give_up(element)

    def _deliver_final(self, response: Response, element: Element) -> None:
        held = self._pacer.close(response.request_id)
        result = response.result
        if result is None:
            if held is not None:
                self._send(element, held)
            assert response.error is not None
            self._end_with_error(response.request_id, element, response.error)
            return
        if held is not None:
            result = held.merged_with(result)
        element.num_output_tokens += result.num_output_tokens
        self._metrics.tokens_sent(result.num_output_tokens)
        self._count_end(element, result)
        *before, last = responses_of(result, element.owner.shape, element.batch_index)
        for each in before:
            element.owner.reply.send(each)
        self._send_last(response.request_id, element, last)

    def _end_with_error(self, engine_id: int, element: Element, error: RequestError) -> None:
        self._metrics.request_failed()
        self._send_last(engine_id, element, error_response(error))

    def _send(self, element: Element, result: Result) -> None:
        """A delta. A client that cannot be reached needs no more of them."""
        if not has_data(result):
            return
        element.num_output_tokens += result.num_output_tokens
        self._metrics.tokens_sent(result.num_output_tokens)
        owner = element.owner
        started, cpu_started = time.monotonic(), time.thread_time()
        (response,) = responses_of(result, owner.shape, element.batch_index)
        if not owner.reply.send(response):
            self._in_flight.cancel(owner)
        self._pacer.sent(time.monotonic() - started, time.thread_time() - cpu_started)

    def _send_last(self, engine_id: int, element: Element, response: object) -> None:
        """FINAL rides on the last response of the last element of a batch.

        The id is free before the client hears of the end, so that it may use it again at once.
        """
        reply = element.owner.reply
        if self._in_flight.end_element(engine_id):
            reply.finish(response)
        elif not reply.send(response):
            self._in_flight.cancel(element.owner)

    def _give_up(self, element: Element) -> None:
        owner = element.owner
        self._in_flight.cancel(owner)
        self._in_flight.end(owner)
        for engine_id in owner.engine_ids:
            self._pacer.close(engine_id)
        self._metrics.request_failed()
        owner.reply.finish(error_response(RequestFailedError("the server could not answer")))

    def _count_end(self, element: Element, result: Result) -> None:
        self._metrics.request_ended(
            result.finish_reason,
            num_input_tokens=result.num_input_tokens,
            num_output_tokens=element.num_output_tokens,
            perf=result.perf_metrics,
            received_ns=element.owner.received_ns,
            answered_ns=time.monotonic_ns(),
        )
