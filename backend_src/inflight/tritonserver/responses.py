"""From the engine's Results to Triton's responses, for both doors of ``inflight_llm``.

A response holds no output that its request did not ask for. Before release 24.12 the server's stub
drops such outputs itself, but in a moment when it does not hold the interpreter's lock: freeing the
array then corrupts the process, and on Python 3.12 and later ends it (python_backend, pull request
390).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import triton_python_backend_utils as pb_utils

from inflight.api.response import FinishReason, Result
from inflight.errors import RequestError, RequestFailedError
from inflight.tritonserver.contract import OUTPUTS, TEXT_OUTPUT, OutputField
from inflight.tritonserver.in_flight import ReplyShape
from inflight.tritonserver.parsed import Door

INTERNAL_ERROR = "internal error: "
"""Begins the text of every error that is not the client's fault. The code alone would not tell: it
is lost between models, and an event stream carries none."""

CANCELLED_EARLY = Result(is_final=True, finish_reason=FinishReason.CANCELLED)
"""The whole answer of a request that was cancelled before the engine saw it."""

_IDS_DOOR = tuple(output for output in OUTPUTS if output is not TEXT_OUTPUT)


def responses_of(result: Result, shape: ReplyShape, batch_index: int) -> list[Any]:
    """The ``InferenceResponse`` objects that say ``result``, in order; the last one ends it.

    A final Result of a streamed answer becomes a response with its data, if it has any, and one
    that has none but the finish reason: clients that drop the text of a final response lose
    nothing. Every other Result is one response.
    """
    parts = _split_final(result) if shape.streaming and result.is_final else (result,)
    return [_response(part, shape, batch_index) for part in parts]


def stop_response(requested_outputs: Collection[str]) -> Any:
    """The one response to a ``stop`` request: the requested ones of both doors' outputs, empty.

    It carries "cancelled" as its finish reason, so that whoever reads only this response knows that
    nothing more will come under the id.
    """
    values = {"finish_reason": FinishReason.CANCELLED.text}
    return _response_of(OUTPUTS, values, requested_outputs)


def error_response(error: RequestError) -> Any:
    """The error as the client sees it: our own failures are INTERNAL, all others INVALID_ARG."""
    if isinstance(error, RequestFailedError):
        return error_of(INTERNAL_ERROR + str(error))
    return error_of(str(error))


def error_of(message: str) -> Any:
    """An error whose text is ready for the client; its code follows from the text."""
    is_internal = message.startswith(INTERNAL_ERROR)
    code = pb_utils.TritonError.INTERNAL if is_internal else pb_utils.TritonError.INVALID_ARG
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def has_data(result: Result) -> bool:
    """Does the Result carry anything that a client would add up?"""
    return bool(result.text or result.output_token_ids or result.num_output_tokens)


def _split_final(result: Result) -> tuple[Result, ...]:
    if not has_data(result):
        return (result,)
    data = replace(
        result,
        is_final=False,
        finish_reason=FinishReason.NOT_FINISHED,
        stop_reason="",
        perf_metrics=None,
    )
    end = replace(
        result,
        text="",
        output_token_ids=(),
        prefix_token_ids=(),
        text_length=0,
        num_output_tokens=0,
        log_probs=(),
    )
    return data, end


def _response(result: Result, shape: ReplyShape, batch_index: int) -> Any:
    """The ids door fills what it has no value for, since the server needs every output that an
    ensemble maps; the text door leaves it out."""
    values = _values(result, shape, batch_index)
    if shape.door is Door.TEXT:
        outputs = tuple(output for output in OUTPUTS if output.name in values)
    else:
        outputs = _IDS_DOOR
    return _response_of(outputs, values, shape.requested_outputs)


def _response_of(
    outputs: Iterable[OutputField], values: Mapping[str, object], requested_outputs: Collection[str]
) -> Any:
    """Those of ``outputs`` that were requested, with a dummy where ``values`` has none."""
    return pb_utils.InferenceResponse(
        [
            _tensor(output, values.get(output.name))
            for output in outputs
            if output.name in requested_outputs
        ]
    )


def _tensor(output: OutputField, value: object) -> Any:
    array = output.dummy() if value is None else output.array(value)
    return pb_utils.Tensor(output.name, array)


def _values(result: Result, shape: ReplyShape, batch_index: int) -> dict[str, object]:
    values: dict[str, object] = {
        "finish_reason": result.finish_reason.text,
        "stop_reason": result.stop_reason,
        "batch_index": batch_index,
        "sequence_index": result.sequence_index,
    }
    if shape.door is Door.TEXT:
        values["text_output"] = result.text
    else:
        values["output_ids"] = result.output_token_ids
        values["sequence_length"] = len(result.output_token_ids)
        values["prefix_token_ids"] = result.prefix_token_ids
        values["text_length"] = result.text_length
    wants = shape.wants
    if wants.num_input_tokens:
        values["num_input_tokens"] = result.num_input_tokens
    if wants.num_output_tokens:
        values["num_output_tokens"] = result.num_output_tokens
    if wants.log_probs:
        values["cum_log_probs"] = result.cum_log_prob
        values["output_log_probs"] = result.log_probs
    if wants.perf_metrics and result.is_final:
        values.update(_perf_values(result))
    return values


def _perf_values(result: Result) -> Mapping[str, object]:
    perf = result.perf_metrics
    if perf is None:
        return {}
    return {
        "kv_cache_alloc_new_blocks": perf.num_new_allocated_blocks,
        "kv_cache_reused_blocks": perf.num_reused_blocks,
        "kv_cache_alloc_total_blocks": perf.num_total_allocated_blocks,
        "arrival_time_ns": perf.arrival_time_ns,
        "first_scheduled_time_ns": perf.first_scheduled_time_ns,
        "first_token_time_ns": perf.first_token_time_ns,
        "last_token_time_ns": perf.last_token_time_ns,
    }
