"""Responder: from what happened to a request to what its owner hears of it."""

from __future__ import annotations

from inflight.api.response import Result
from inflight.engine.outbox import Outbox
from inflight.engine.record import RequestRecord
from inflight.errors import RequestError
from inflight.text.stream import TextDelta


class Responder:
    """Collects the Results of an iteration and hands them to the outbox in one go.

    Every request gets exactly one final word: ``final`` or ``error``, called once by the loop.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._batch: list[tuple[int, str | None, Result]] = []

    def delta(self, record: RequestRecord, iteration: int) -> None:
        """Text that has become safe to send, if any; without streaming it stays in the stream."""
        if not record.llm.request.streaming:
            return
        delta = record.stream.take()
        if delta.token_ids:
            self._add(record, _result(record, delta, iteration))

    def final(self, record: RequestRecord, iteration: int) -> None:
        """The last word: everything that was held back, and why the request ended."""
        assert record.has_ended
        self._add(record, _result(record, record.stream.finish(), iteration))

    def error(self, record: RequestRecord, error: RequestError) -> None:
        self._outbox.put_error(record.llm.request_id, record.llm.request.client_id, error)

    def flush(self) -> None:
        """Makes the iteration's Results visible to readers."""
        if self._batch:
            self._outbox.put_batch(self._batch)
            self._batch = []

    def _add(self, record: RequestRecord, result: Result) -> None:
        llm = record.llm
        self._batch.append((llm.request_id, llm.request.client_id, result))


def _result(record: RequestRecord, delta: TextDelta, iteration: int) -> Result:
    log_probs = tuple(record.log_probs[: delta.num_generated_tokens])
    del record.log_probs[: delta.num_generated_tokens]
    record.cum_log_prob += sum(log_probs)
    return Result(
        is_final=record.has_ended,
        output_token_ids=delta.token_ids,
        text=delta.text,
        prefix_token_ids=delta.prefix_token_ids,
        text_length=delta.text_length,
        num_input_tokens=record.llm.prompt_length,
        num_output_tokens=delta.num_generated_tokens,
        finish_reason=record.llm.finish_reason,
        stop_reason=record.stop_reason,
        log_probs=log_probs,
        cum_log_prob=record.cum_log_prob,
        decoding_iter=iteration,
        perf_metrics=record.perf,
    )
