"""How requests end early, and what the radius of each fault is."""

from __future__ import annotations

import threading
import time

import pytest

from inflight.api import (
    FinishReason,
    Request,
)
from inflight.errors import (
    RequestFailedError,
    ShuttingDownError,
)
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens
from tests.fakes.executors import make_executor, wait_for


def test_cancel_computes_at_most_one_further_iteration() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(inputs: object) -> None:
        if runner.num_forwards == 5:
            entered.set()
            assert go_on.wait(5)

    runner = ArithmeticRunner(hold)
    with make_executor(runner) as executor:
        request_id = executor.enqueue_request(
            Request(input_token_ids=(1, 2, 3), max_tokens=150, streaming=True)
        )
        assert entered.wait(5)
        executor.cancel_request(request_id)
        go_on.set()
        results = []
        while not results or not results[-1].is_final:
            results += [r.result for r in executor.await_responses(request_id, timeout=5)]
        wait_for(lambda: executor.kv_cache_stats().used_num_blocks == 0)
    assert runner.num_forwards == 5
    assert results[-1].finish_reason is FinishReason.CANCELLED
    tokens = [token for part in results for token in part.output_token_ids]
    assert tokens == expected_tokens([1, 2, 3], 4), "the fifth forward's token is not sent"


def test_cancel_of_a_queued_request() -> None:
    go_on = threading.Event()
    runner = ArithmeticRunner(lambda inputs: go_on.wait(5) and None)
    with make_executor(runner, max_batch_size=1) as executor:
        first = executor.enqueue_request(Request(input_token_ids=(1,), max_tokens=3))
        second = executor.enqueue_request(Request(input_token_ids=(2,), max_tokens=3))
        executor.cancel_request(second)
        executor.cancel_request(999_999)
        go_on.set()
        (answer,) = executor.await_responses(second, timeout=5)
        assert answer.result.finish_reason is FinishReason.CANCELLED
        assert answer.result.num_output_tokens == 0
        (answer,) = executor.await_responses(first, timeout=5)
        assert list(answer.result.output_token_ids) == expected_tokens([1], 3)


def test_cancel_that_overtakes_its_request() -> None:
    """Both arrive while a forward runs; the look after the forward sees the cancellation first."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(inputs: object) -> None:
        entered.set()
        assert go_on.wait(5)

    runner = ArithmeticRunner(hold)
    with make_executor(runner) as executor:
        first = executor.enqueue_request(Request(input_token_ids=(1,), max_tokens=2))
        assert entered.wait(5)
        second = executor.enqueue_request(Request(input_token_ids=(2,), max_tokens=100))
        executor.cancel_request(second)
        go_on.set()
        (answer,) = executor.await_responses(second, timeout=5)
        assert answer.result.finish_reason is FinishReason.CANCELLED
        assert answer.result.num_output_tokens == 0
        assert executor.await_responses(first, timeout=5)


def test_timeout_ends_with_what_there_is() -> None:
    runner = ArithmeticRunner(lambda inputs: time.sleep(0.01))
    with make_executor(runner) as executor:
        output = executor.generate([[1, 2, 3]], max_tokens=190, allotted_time_ms=120)[0]
    assert output.finish_reason is FinishReason.TIMED_OUT
    assert 0 < output.num_output_tokens < 30
    assert list(output.token_ids) == expected_tokens([1, 2, 3], output.num_output_tokens)


def test_a_failing_forward_ends_its_batch_and_nobody_else() -> None:
    def fail_third(inputs: object) -> None:
        if runner.num_forwards == 3:
            raise RuntimeError("secret /path/of/this/machine")

    runner = ArithmeticRunner(fail_third)
    with make_executor(runner, max_batch_size=2) as executor:
        request = Request(input_token_ids=(1, 2, 3), max_tokens=10)
        ids = [executor.enqueue_request(request) for _ in range(6)]
        answers = [executor.await_responses(request_id, timeout=5)[0] for request_id in ids]
        failed = [answer for answer in answers if answer.has_error]
        assert 1 <= len(failed) <= 2
        assert all(isinstance(answer.error, RequestFailedError) for answer in failed)
        assert all("secret" not in str(answer.error) for answer in failed)
        for answer in answers:
            if not answer.has_error:
                assert list(answer.result.output_token_ids) == expected_tokens([1, 2, 3], 10)
        assert executor.is_healthy
        wait_for(lambda: executor.kv_cache_stats().used_num_blocks == 0)


def test_an_engine_error_answers_everyone_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    monkeypatch.setattr(
        executor._engine.loop.parts.scheduler, "schedule", lambda *a, **k: 1 / 0, raising=True
    )
    request_id = executor.enqueue_request(Request(input_token_ids=(1, 2), max_tokens=5))
    (answer,) = executor.await_responses(request_id, timeout=5)
    assert isinstance(answer.error, RequestFailedError)
    wait_for(lambda: not executor.is_healthy)
    with pytest.raises(RequestFailedError):
        executor.enqueue_request(Request(input_token_ids=(1, 2), max_tokens=5))
    executor.shutdown()


def test_shutdown_answers_everyone() -> None:
    runner = ArithmeticRunner(lambda inputs: time.sleep(0.005))
    executor = make_executor(runner, max_batch_size=2)
    ids = [
        executor.enqueue_request(Request(input_token_ids=(i + 1,), max_tokens=150, streaming=True))
        for i in range(6)
    ]
    wait_for(lambda: runner.num_forwards > 3)
    executor.shutdown()
    for request_id in ids:
        (answer,) = executor.await_responses(request_id, timeout=1)
        assert isinstance(answer.error, ShuttingDownError)
    with pytest.raises(ShuttingDownError):
        executor.enqueue_request(Request(input_token_ids=(1,), max_tokens=1))
