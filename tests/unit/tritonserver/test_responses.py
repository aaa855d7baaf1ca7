from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.api.response import FinishReason, RequestPerfMetrics, Result
from inflight.errors import InvalidRequestError, QueueFullError, RequestFailedError
from inflight.tritonserver.contract import OUTPUTS
from inflight.tritonserver.in_flight import ReplyShape
from inflight.tritonserver.parsed import Door, Wants
from inflight.tritonserver.responses import (
    error_of,
    error_response,
    has_data,
    responses_of,
    stop_response,
)
from tests.fakes.fake_pb_utils import InferenceResponse, TritonError

PERF = RequestPerfMetrics(
    arrival_time_ns=1,
    first_scheduled_time_ns=2,
    first_token_time_ns=3,
    last_token_time_ns=2**40,
    num_total_allocated_blocks=9,
    num_new_allocated_blocks=7,
    num_reused_blocks=2,
)
DELTA = Result(
    is_final=False,
    output_token_ids=(11, 12),
    text="hé",
    prefix_token_ids=(5, 6, 7),
    text_length=2,
    num_input_tokens=4,
    num_output_tokens=2,
    log_probs=(-0.5, -1.5),
    cum_log_prob=-2.0,
)
FINAL = Result(
    is_final=True,
    output_token_ids=(13,),
    text="y",
    prefix_token_ids=(6, 7),
    text_length=1,
    num_input_tokens=4,
    num_output_tokens=1,
    finish_reason=FinishReason.STOP_WORDS,
    stop_reason="END",
    log_probs=(-0.25,),
    cum_log_prob=-2.25,
    perf_metrics=PERF,
)
EVERY_OUTPUT = frozenset(output.name for output in OUTPUTS)
EVERYTHING = Wants(log_probs=True, perf_metrics=True, num_input_tokens=True, num_output_tokens=True)


def shape(
    door: Door,
    *,
    streaming: bool = True,
    wants: Wants | None = None,
    requested_outputs: frozenset[str] = EVERY_OUTPUT,
) -> ReplyShape:
    return ReplyShape(
        door=door,
        streaming=streaming,
        num_elements=1,
        wants=wants or Wants(),
        requested_outputs=requested_outputs,
    )


def arrays(response: InferenceResponse) -> dict[str, np.ndarray]:
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def text(array: np.ndarray) -> str:
    """A STRING output is sent 1-D with one element."""
    assert array.shape == (1,)
    value = array[0]
    assert isinstance(value, bytes)
    return value.decode()


def one(array: np.ndarray) -> Any:
    """A scalar output has the batch axis and its own."""
    assert array.shape == (1, 1)
    return array.item()


def test_a_delta_of_the_text_door_is_short() -> None:
    (response,) = responses_of(DELTA, shape(Door.TEXT), 3)
    out = arrays(response)
    assert list(out) == [
        "text_output",
        "finish_reason",
        "stop_reason",
        "batch_index",
        "sequence_index",
    ]
    assert (text(out["text_output"]), text(out["finish_reason"])) == ("hé", "")
    assert (one(out["batch_index"]), one(out["sequence_index"])) == (3, 0)


def test_what_was_asked_for_is_added() -> None:
    (response,) = responses_of(DELTA, shape(Door.TEXT, wants=EVERYTHING), 0)
    out = arrays(response)
    assert (one(out["num_input_tokens"]), one(out["num_output_tokens"])) == (4, 2)
    np.testing.assert_array_equal(out["output_log_probs"], np.float32([[[-0.5, -1.5]]]))
    np.testing.assert_array_equal(out["cum_log_probs"], np.float32([[-2.0]]))
    assert "arrival_time_ns" not in out  # perf metrics come with the last response


@pytest.mark.parametrize("door", list(Door))
def test_a_streamed_end_with_text_is_data_and_then_an_empty_last_response(door: Door) -> None:
    data, end = (arrays(r) for r in responses_of(FINAL, shape(door, wants=EVERYTHING), 0))
    assert text(data["finish_reason"]) == text(data["stop_reason"]) == ""
    assert (text(end["finish_reason"]), text(end["stop_reason"])) == ("stop", "END")
    assert (one(data["num_output_tokens"]), one(end["num_output_tokens"])) == (1, 0)
    assert one(data["num_input_tokens"]) == one(end["num_input_tokens"]) == 4
    assert end["output_log_probs"].shape == (1, 1, 0)
    assert one(end["cum_log_probs"]) == -2.25
    assert one(end["last_token_time_ns"]) == 2**40
    assert one(end["kv_cache_reused_blocks"]) == 2
    if door is Door.TEXT:
        assert (text(data["text_output"]), text(end["text_output"])) == ("y", "")
    else:
        assert data["output_ids"].tolist() == [[[13]]]
        assert (one(data["sequence_length"]), one(end["sequence_length"])) == (1, 0)
        assert (one(data["text_length"]), one(end["text_length"])) == (1, 0)


def test_a_streamed_end_without_data_is_one_response() -> None:
    bare = Result(is_final=True, finish_reason=FinishReason.LENGTH, num_input_tokens=4)
    (response,) = responses_of(bare, shape(Door.TEXT), 0)
    out = arrays(response)
    assert (text(out["text_output"]), text(out["finish_reason"])) == ("", "length")


@pytest.mark.parametrize("door", list(Door))
def test_a_whole_answer_is_one_response_with_the_totals(door: Door) -> None:
    whole = DELTA.merged_with(FINAL)
    (response,) = responses_of(whole, shape(door, streaming=False, wants=EVERYTHING), 0)
    out = arrays(response)
    assert text(out["finish_reason"]) == "stop"
    assert one(out["num_output_tokens"]) == 3
    if door is Door.TEXT:
        assert text(out["text_output"]) == "héy"
    else:
        assert out["output_ids"].tolist() == [[[11, 12, 13]]]
        assert out["prefix_token_ids"].tolist() == [[5, 6, 7]]
        assert one(out["text_length"]) == 3


def test_every_response_of_the_ids_door_has_every_output_of_the_ensemble() -> None:
    needed = {output.name: output for output in OUTPUTS if output.name != "text_output"}
    for result in (DELTA, FINAL):
        for response in responses_of(result, shape(Door.IDS), 0):
            out = arrays(response)
            assert set(out) == set(needed)
            assert {name: array.dtype for name, array in out.items()} == {
                name: output.dtype.numpy for name, output in needed.items()
            }
            assert one(out["num_output_tokens"]) == 0  # a dummy: nobody asked


@pytest.mark.parametrize("door", list(Door))
def test_an_output_that_was_not_requested_is_not_sent(door: Door) -> None:
    requested = frozenset({"output_ids", "text_output", "finish_reason", "unknown"})
    for response in responses_of(FINAL, shape(door, requested_outputs=requested), 0):
        ours = "text_output" if door is Door.TEXT else "output_ids"
        assert set(arrays(response)) == {ours, "finish_reason"}


def test_a_stop_request_is_answered_with_what_it_requested() -> None:
    assert list(arrays(stop_response(["finish_reason"]))) == ["finish_reason"]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_a_stop_request_is_answered_on_both_doors(output: Any) -> None:
    out = arrays(stop_response(EVERY_OUTPUT))
    expected = "cancelled" if output.name == "finish_reason" else ""
    if out[output.name].dtype == object:
        assert text(out[output.name]) == expected
    else:
        assert not out[output.name].any()


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            InvalidRequestError("top_p", 1.5, "must be between 0 and 1"),
            "top_p: 1.5 must be between 0 and 1",
            TritonError.INVALID_ARG,
        ),
        (QueueFullError("full"), "full", TritonError.INVALID_ARG),
        (RequestFailedError("broken"), "internal error: broken", TritonError.INTERNAL),
    ],
)
def test_errors_tell_whose_fault_it_was(error: Any, message: str, code: int) -> None:
    sent = error_response(error).error()
    assert (sent.message(), sent.code()) == (message, code)
    passed_on = error_of(sent.message()).error()  # as ensemble_sync does, which loses the code
    assert (passed_on.message(), passed_on.code()) == (message, code)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (DELTA, True),
        (Result(is_final=False), False),
        (Result(is_final=False, text="x"), True),
        (Result(is_final=False, num_output_tokens=1), True),
        (Result(is_final=False, output_token_ids=(1,)), True),
    ],
)
def test_has_data(result: Result, expected: bool) -> None:
    assert has_data(result) is expected
