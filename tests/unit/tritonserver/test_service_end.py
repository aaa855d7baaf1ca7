"""How LlmService ends: shutdown, and the engine's own failure. Everybody is answered."""

from __future__ import annotations

import threading

import pytest

from inflight.tritonserver import service as service_module
from inflight.tritonserver.pump import ResponsePump
from tests.unit.tritonserver.service_kit import (
    RunningService,
    running_service,
    sends,
    text_request,
    value,
    wait_until,
)


def test_close_answers_everyone_and_ends_the_threads() -> None:
    before = threading.active_count()
    running = RunningService()
    requests = [running.submit(text_request("x", "y")), running.submit(text_request())]
    running.executor.wait_for_requests(3)
    running.service.close()
    for request in requests:
        assert sends(request)[-1].error == "the server is shutting down"
    assert threading.active_count() == before
    assert running.executor.is_shut_down


def test_after_close_requests_are_refused() -> None:
    running = RunningService()
    running.service.close()
    (only,) = sends(running.submit(text_request()))
    assert only.error is not None and "shutting down" in only.error


def test_close_may_be_called_again() -> None:
    running = RunningService()
    running.service.close()
    running.service.close()
    assert running.exit_codes == []


def test_close_answers_requests_that_wait_for_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real = service_module.build_requests

    def slow(*args: object) -> object:
        entered.set()
        go_on.wait(5)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(service_module, "build_requests", slow)
    running = RunningService()
    requests = [running.submit(text_request()) for _ in range(6)]
    assert entered.wait(5)
    closing = threading.Thread(target=running.service.close)
    closing.start()
    go_on.set()
    closing.join(10)
    for request in requests:
        assert sends(request)[-1].error == "the server is shutting down"


def test_an_engine_failure_answers_everyone_and_ends_the_process() -> None:
    with running_service() as running:
        request = running.submit(text_request())
        running.executor.wait_for_requests(1)
        running.executor.say(1, "a")
        wait_until(lambda: request.sender.sends, "the first delta")
        running.executor.break_down()
        wait_until(lambda: running.exit_codes, "the end of the process")
        assert running.exit_codes == [service_module.EXIT_CODE]
        first, last = sends(request)
        assert value(first, "text_output") == "a"
        assert last.error == "internal error: the engine stopped on an error"
        (late,) = sends(running.submit(text_request()))
        assert late.error is not None


def test_answers_are_out_before_the_process_ends() -> None:
    requests = [text_request() for _ in range(5)]
    closed_at_exit: list[bool] = []

    def exit_process(_: int) -> None:
        closed_at_exit.extend(request.sender.closed for request in requests)

    running = RunningService(exit_process)
    for request in requests:
        running.submit(request)
    running.executor.wait_for_requests(5)
    running.executor.break_down()
    wait_until(lambda: closed_at_exit, "the end of the process")
    assert closed_at_exit == [True] * 5
    running.service.close()


def test_a_pump_that_dies_is_an_engine_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: ResponsePump) -> None:
        raise ZeroDivisionError("a bug")

    with running_service() as running:
        request = running.submit(text_request())
        running.executor.wait_for_requests(1)
        monkeypatch.setattr(ResponsePump, "_turn", broken)
        wait_until(lambda: running.exit_codes, "the end of the process")
        assert sends(request)[-1].error == "internal error: the engine stopped on an error"


def test_an_answer_that_cannot_be_built_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from inflight.tritonserver import pump

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with running_service() as running:
        request = running.submit(text_request(request_id="r"))
        running.executor.wait_for_requests(1)
        monkeypatch.setattr(pump, "responses_of", broken)
        running.executor.say(1, "a")
        (only,) = sends(request)
        assert only.error == "internal error: the server could not answer"
        assert running.executor.cancelled == [1]
        monkeypatch.undo()
        again = running.submit(text_request(request_id="r"))
        running.executor.wait_for_requests(2)
        running.executor.finish(2, text="fine")
        assert value(sends(again)[0], "text_output") == "fine"
        assert running.exit_codes == []
