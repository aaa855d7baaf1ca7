"""What clients see of LlmService, path by path: each request gets exactly one FINAL."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from inflight.api.response import FinishReason
from inflight.errors import InvalidRequestError, QueueFullError, RequestFailedError
from inflight.tritonserver import backlog
from inflight.tritonserver import service as service_module
from tests.fakes.fake_pb_utils import InferenceRequest, TritonError
from tests.unit.tritonserver.service_kit import (
    RunningService,
    ids_request,
    running_service,
    sends,
    stop_request,
    text_request,
    texts,
    value,
    wait_until,
)


@pytest.fixture
def running() -> Iterator[RunningService]:
    with running_service() as running:
        yield running


def say_and_wait(running: RunningService, request: InferenceRequest, engine_id: int) -> None:
    """One delta that has arrived before anything else happens."""
    running.executor.say(engine_id, "a")
    wait_until(lambda: request.sender.sends, "the first delta")


def test_a_stream_is_deltas_and_an_empty_last_response(running: RunningService) -> None:
    request = running.submit(text_request())
    (engine_id,) = running.executor.wait_for_requests(1)
    say_and_wait(running, request, engine_id)
    running.executor.say(engine_id, "b", "c")
    running.executor.finish(engine_id, FinishReason.STOP_WORDS, text="d", stop_reason="END")
    assert "".join(texts(request)) == "abcd"
    *data, last = sends(request)
    assert {value(send, "finish_reason") for send in data} == {""}
    assert value(last, "text_output") == ""
    assert (value(last, "finish_reason"), value(last, "stop_reason")) == ("stop", "END")


def test_token_counts_of_a_stream_add_up(running: RunningService) -> None:
    wants = ("return_num_input_tokens", "return_num_output_tokens")
    request = running.submit(text_request(wants=wants))
    (engine_id,) = running.executor.wait_for_requests(1)
    say_and_wait(running, request, engine_id)
    running.executor.finish(engine_id, text="bcd")
    counts = [value(send, "num_output_tokens") for send in sends(request)]
    assert counts == [1, 3, 0]
    assert {value(send, "num_input_tokens") for send in sends(request)} == {3}


def test_without_streaming_there_is_one_response(running: RunningService) -> None:
    request = running.submit(text_request(stream=False))
    (engine_id,) = running.executor.wait_for_requests(1)
    running.executor.finish(engine_id, text="whole")
    (only,) = sends(request)
    assert (value(only, "text_output"), value(only, "finish_reason")) == ("whole", "length")


def test_the_ids_door_answers_with_ids(running: RunningService) -> None:
    request = running.submit(ids_request(5, 6, 7))
    (engine_id,) = running.executor.wait_for_requests(1)
    assert running.executor.requests[engine_id].input_token_ids == (5, 6, 7)
    running.executor.finish(engine_id, text="hi")
    data, last = sends(request)
    assert data.output("output_ids").tolist() == [[[ord("h"), ord("i")]]]
    assert (value(data, "text_length"), value(last, "text_length")) == (2, 0)
    assert "text_output" not in data.output_names


def test_a_batch_is_one_engine_request_each_and_final_rides_on_the_last(
    running: RunningService,
) -> None:
    request = running.submit(text_request("x", "yy", "zzz", stream=False))
    ids = running.executor.wait_for_requests(3)
    assert [len(running.executor.requests[i].input_token_ids) for i in ids] == [1, 2, 3]
    for engine_id in (ids[2], ids[0]):
        running.executor.finish(engine_id, text=str(engine_id))
    wait_until(lambda: len(request.sender.sends) == 2, "the first two answers")
    running.executor.fail(ids[1], RequestFailedError("broken"))
    answers = sends(request)
    assert [value(send, "batch_index") for send in answers[:2]] == [2, 0]
    assert answers[2].error == "internal error: broken"


def test_an_engine_error_comes_after_the_text_there_was(running: RunningService) -> None:
    request = running.submit(text_request())
    (engine_id,) = running.executor.wait_for_requests(1)
    say_and_wait(running, request, engine_id)
    running.executor.fail(engine_id, RequestFailedError("the batch failed"))
    first, last = sends(request)
    assert value(first, "text_output") == "a"
    assert last.error == "internal error: the batch failed"
    assert last.response is not None and last.response.error().code() == TritonError.INTERNAL


def test_a_bad_request_is_refused_by_name(running: RunningService) -> None:
    request = running.submit(text_request(""))
    (only,) = sends(request)
    assert only.error is not None and only.error.startswith("text_input:")
    assert running.executor.requests == {}


@pytest.mark.parametrize("num_taken", [0, 2])
def test_what_the_executor_refuses_is_refused_whole(
    running: RunningService, num_taken: int
) -> None:
    running.executor.refuse_with = QueueFullError("the queue is full")
    running.executor.num_enqueues_before_refusal = num_taken
    request = running.submit(text_request("x", "y", "z", request_id="r"))
    (only,) = sends(request)
    assert only.error == "the queue is full"
    assert running.executor.cancelled == list(range(1, num_taken + 1))
    running.executor.refuse_with = None
    again = running.submit(text_request(request_id="r", stream=False))  # the id is free
    running.executor.finish(running.executor.wait_for_requests(num_taken + 1)[-1], text="ok")
    assert texts(again) == ["ok"]


def test_an_id_in_flight_is_refused_and_free_again_afterwards(running: RunningService) -> None:
    first = running.submit(text_request(request_id="same"))
    running.executor.wait_for_requests(1)
    second = running.submit(text_request(request_id="same"))
    (only,) = sends(second)
    assert only.error is not None and "'same' is already in flight" in only.error
    running.executor.finish(1, text="x")
    assert texts(first) == ["x", ""]
    third = running.submit(text_request(request_id="same"))
    running.executor.wait_for_requests(2)
    running.executor.finish(2, text="y")
    assert texts(third) == ["y", ""]


def test_requests_without_an_id_never_collide(running: RunningService) -> None:
    requests = [running.submit(text_request()) for _ in range(3)]
    for engine_id in running.executor.wait_for_requests(3):
        running.executor.finish(engine_id)
    assert [texts(request) for request in requests] == [[""]] * 3


def test_a_stop_request_cancels_every_element_of_its_id(running: RunningService) -> None:
    request = running.submit(text_request("x", "y", request_id="r"))
    other = running.submit(text_request(request_id="other"))
    running.executor.wait_for_requests(3)
    stop = running.submit(stop_request("r"))
    (answer,) = sends(stop)
    assert (value(answer, "text_output"), value(answer, "finish_reason")) == ("", "cancelled")
    assert {value(send, "finish_reason") for send in sends(request)} == {"cancelled"}
    assert len(running.executor.cancelled) == 2
    assert other.sender.sends == []


def test_a_stop_of_an_unknown_id_is_fine(running: RunningService) -> None:
    (answer,) = sends(running.submit(stop_request("nobody")))
    assert answer.error is None


def test_a_stop_is_answered_with_the_outputs_that_it_requested(running: RunningService) -> None:
    (answer,) = sends(running.submit(stop_request("nobody", ["finish_reason"])))
    assert answer.output_names == ["finish_reason"]


def test_a_stop_without_an_id_says_what_is_missing(running: RunningService) -> None:
    (answer,) = sends(running.submit(stop_request("")))
    assert answer.error is not None and answer.error.startswith("id: '' is empty")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("early", [True, False], ids=["waiting", "tokenizing"])
def test_a_stop_reaches_a_request_that_is_still_being_tokenized(
    running: RunningService, monkeypatch: pytest.MonkeyPatch, stream: bool, early: bool
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real = service_module.build_requests

    def slow(*args: object) -> object:
        entered.set()
        go_on.wait(5)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(service_module, "build_requests", slow)
    blockers = [running.submit(text_request()) for _ in range(2 if early else 0)]
    request = running.submit(text_request("x", "y", request_id="r", stream=stream))
    assert entered.wait(5)
    running.submit(stop_request("r"))
    go_on.set()
    answers = sends(request)
    assert [value(send, "finish_reason") for send in answers] == ["cancelled"] * 2
    assert [value(send, "batch_index") for send in answers] == [0, 1]
    wait_until(lambda: len(running.executor.requests) == len(blockers), "the blockers alone")


def test_a_client_that_has_gone_is_cancelled(running: RunningService) -> None:
    request, other = (running.submit(text_request(name)) for name in ("gone", "there"))
    engine_id = running.executor.id_of("gone")
    running.executor.id_of("there")
    request.sender.cancelled = True
    assert value(sends(request)[-1], "finish_reason") == "cancelled"
    assert running.executor.cancelled == [engine_id]
    assert other.sender.sends == []


def test_a_failing_send_cancels_that_request_and_no_other(running: RunningService) -> None:
    request, other = (running.submit(text_request(name)) for name in ("gone", "there"))
    engine_id = running.executor.id_of("gone")
    request.sender.fail_with = RuntimeError("gone")
    running.executor.say(engine_id, "a")
    wait_until(lambda: running.executor.cancelled, "the cancellation")
    assert running.executor.cancelled == [engine_id]
    running.executor.finish(running.executor.id_of("there"), text="fine")
    assert texts(other) == ["fine", ""]
    assert request.sender.sends == []


def test_a_failing_send_inside_a_batch_cancels_its_other_elements(running: RunningService) -> None:
    request = running.submit(text_request("x", "y", stream=False))
    first, second = running.executor.wait_for_requests(2)
    request.sender.fail_with = RuntimeError("gone")
    running.executor.finish(first, text="done")
    wait_until(lambda: second in running.executor.cancelled, "the other element")
    assert request.sender.sends == []


def test_submit_never_raises(running: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service_module, "read_request", broken)
    (only,) = sends(running.submit(text_request()))
    assert only.error == "internal error: the server failed while it read this request"

    class Hopeless:
        def get_response_sender(self) -> None:
            raise RuntimeError("no sender")

    running.service.submit(Hopeless())


def test_a_bug_while_tokenizing_ends_one_request(
    running: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("/a/path")

    monkeypatch.setattr(service_module, "build_requests", broken)
    (only,) = sends(running.submit(text_request(request_id="r")))
    assert only.error is not None and "/a/path" not in only.error
    monkeypatch.undo()
    running.submit(text_request(request_id="r"))
    running.executor.wait_for_requests(1)


@pytest.mark.parametrize(
    ("limit", "value", "refused"),
    [("MAX_REQUESTS", 2, "2 requests"), ("MAX_PROMPT_SIZE", 8, "2 requests with 6 characters")],
)
def test_what_waits_to_be_tokenized_is_bounded(
    running: RunningService, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, refused: str
) -> None:
    go_on = threading.Event()
    real = service_module.build_requests

    def slow(*args: object) -> object:
        go_on.wait(5)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(service_module, "build_requests", slow)
    monkeypatch.setattr(backlog, limit, value)
    for _ in range(2):
        running.submit(text_request("a prompt beyond the limit"))
        wait_until(lambda: running.service._backlog.num_requests == 0, "a thread has taken it")
    for name in ("one", "two"):
        running.submit(text_request("abc", request_id=name))
    (only,) = sends(running.submit(text_request("abc", request_id="three")))
    assert only.error is not None and only.error.startswith(refused)
    go_on.set()
    running.executor.wait_for_requests(4)
    running.submit(text_request("abc", request_id="three"))
    running.executor.wait_for_requests(5)


def test_an_error_of_the_request_error_kind_keeps_its_text(
    running: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InvalidRequestError("top_p", 3, "must be between 0 and 1")

    monkeypatch.setattr(service_module, "build_requests", refuse)
    (only,) = sends(running.submit(text_request()))
    assert only.error == "top_p: 3 must be between 0 and 1"
