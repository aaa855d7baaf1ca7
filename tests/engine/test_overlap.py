"""What happens beside a forward, and what becomes of the iteration that is in flight meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from inflight.api import (
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    Request,
    Response,
)
from inflight.engine.engine import Engine
from inflight.engine.lane import ForwardWork, InlineLane
from inflight.errors import ForwardError
from inflight.executor.forward_thread import ForwardThread
from inflight.model.runner import ForwardOutput, PackedInputs, nothing_beside
from inflight.sampling.sampler import SampledTokens
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens


class WatchedLane(InlineLane):
    """Calls ``beside`` when the loop has done all that it does beside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_started = 0
        self.beside: Callable[[], None] = lambda: None

    def start(self, work: ForwardWork) -> None:
        self.num_started += 1
        super().start(work)

    def wait(self) -> SampledTokens:
        self.beside()
        return super().wait()


def make_engine(runner: ArithmeticRunner | None = None) -> tuple[Engine, WatchedLane]:
    lane = WatchedLane()
    config = ExecutorConfig(
        max_batch_size=4,
        max_num_tokens=16,
        max_seq_len=64,
        kv_cache_config=KvCacheConfig(tokens_per_block=4, num_blocks=40),
    )
    return Engine(runner or ArithmeticRunner(), config, lane=lane), lane


def enqueue(engine: Engine, prompt: list[int], max_tokens: int, *stop: int) -> int:
    request_id = engine.next_id()
    request = Request(
        input_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        streaming=True,
        stop_token_sequences=tuple((token,) for token in stop),
    )
    engine.enqueue(request_id, request)
    return request_id


def ids_of(responses: list[Response]) -> list[int]:
    return [t for r in responses if r.result is not None for t in r.result.output_token_ids]


def test_tokens_are_delivered_while_the_next_iteration_runs() -> None:
    engine, lane = make_engine()
    heard: list[list[int]] = []
    lane.beside = lambda: heard.append(ids_of(engine.outbox.take(None, 0)))
    enqueue(engine, [1, 2, 3], 4)
    for _ in range(4):
        assert engine.loop.step()
    first = [[token] for token in expected_tokens([1, 2, 3], 3)]
    assert heard == [[], *first], "the first token is out before the second is computed"
    assert not engine.loop.step(), "the last token, and nothing more to compute"
    (last,) = engine.outbox.take(None, 0)
    assert ids_of([last]) == expected_tokens([1, 2, 3], 4)[3:] and last.is_final
    assert not engine.loop.has_work


def test_a_stop_costs_one_token_that_nobody_hears_of() -> None:
    engine, lane = make_engine()
    tokens = expected_tokens([9, 8], 10)
    assert tokens[3] not in tokens[:3]
    enqueue(engine, [9, 8], 10, tokens[3])
    other = enqueue(engine, [5], 10)
    started_when_final: list[int] = []
    heard: list[Response] = []

    def listen() -> None:
        heard.extend(engine.outbox.take(None, 0))
        finals = [r for r in heard if r.is_final and r.request_id != other]
        if finals and not started_when_final:
            started_when_final.append(lane.num_started)
            assert len(engine.loop.book) == 1, "it has left while its row is still in flight"

    lane.beside = listen
    while engine.loop.has_work:
        engine.loop.step()
        engine.kv.check_integrity()
    listen()
    stopped = [r for r in heard if r.request_id != other]
    assert ids_of(stopped) == tokens[:3]
    assert stopped[-1].result is not None
    assert stopped[-1].result.finish_reason is FinishReason.STOP_WORDS
    assert stopped[-1].result.stop_reason == str(tokens[3])
    assert started_when_final == [5], "found beside the fifth forward, after four tokens"
    assert ids_of([r for r in heard if r.request_id == other]) == expected_tokens([5], 10)
    assert engine.kv.stats().used_num_blocks == 0
    generated = sum(s.num_generated_tokens for s in engine.stats.take_iterations())
    assert generated == 4 + 10, "the token that was dropped is not counted"


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    engine, _ = make_engine()
    tokens = expected_tokens([9, 8], 4)
    enqueue(engine, [9, 8], 4, tokens[3])
    while engine.loop.has_work:
        engine.loop.step()
    (answer,) = engine.outbox.take(None, 0)
    assert answer.result is not None
    assert answer.result.finish_reason is FinishReason.STOP_WORDS
    assert list(answer.result.output_token_ids) == tokens[:3]


def test_blocks_of_a_stopped_request_are_not_written_over_by_its_row_in_flight() -> None:
    """Another request takes them at once; its tokens come out right."""
    engine, _ = make_engine()
    tokens = expected_tokens([9, 8], 30)
    enqueue(engine, [9, 8], 30, tokens[5])
    for _ in range(5):
        engine.loop.step()
    later = enqueue(engine, [4] * 9, 40)
    heard: list[Response] = []
    while engine.loop.has_work:
        engine.loop.step()
        heard += engine.outbox.take(None, 0)
    assert ids_of([r for r in heard if r.request_id == later]) == expected_tokens([4] * 9, 40)


def test_who_arrives_during_a_forward_is_in_the_next_plan() -> None:
    rows: list[int] = []
    runner = ArithmeticRunner(lambda inputs: rows.append(len(inputs.context_lens)))
    engine, lane = make_engine(runner)
    enqueue(engine, [1, 2, 3], 10)
    engine.loop.step()
    lane.beside = lambda: None if len(rows) > 1 else enqueue(engine, [6, 7], 10) and None
    engine.loop.step()
    engine.loop.step()
    assert rows == [1, 1, 2]


def test_a_failing_forward_does_not_touch_who_has_stopped_meanwhile() -> None:
    tokens = expected_tokens([9, 8], 10)

    def fail(inputs: object) -> None:
        if runner.num_forwards == 5:
            raise ForwardError("asked to fail")

    runner = ArithmeticRunner(fail)
    engine, _ = make_engine(runner)
    stopped = enqueue(engine, [9, 8], 10, tokens[3])
    failed = enqueue(engine, [5], 10)
    while engine.loop.has_work:
        engine.loop.step()
    answers = {r.request_id: r for r in engine.outbox.take(None, 0)}
    assert answers[failed].has_error
    result = answers[stopped].result
    assert result is not None and result.finish_reason is FinishReason.STOP_WORDS
    assert list(result.output_token_ids) == tokens[:3]
    engine.kv.check_integrity()
    assert engine.kv.stats().used_num_blocks == 0


def test_no_forward_is_left_running_when_delivery_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lane = make_engine()
    waited: list[bool] = []
    request_id = enqueue(engine, [1, 2], 10)
    engine.loop.step()
    lane.beside = lambda: waited.append(True)
    monkeypatch.setattr(engine.loop.parts.responder, "delta", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.loop.step()
    assert waited == [True]
    engine.loop.fail_everyone(lambda: ForwardError("over"))
    (answer,) = engine.outbox.take(None, 0)
    assert answer.request_id == request_id and answer.has_error


class LikeliestRunner(ArithmeticRunner):
    """Answers with ids alone where no logits are needed, and remembers whether they were."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: set[bool] = set()

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        self.needs.add(inputs.need_logits)
        logits = super().forward(inputs, launched).logits
        if inputs.need_logits or logits is None:
            return ForwardOutput(logits=logits)
        return ForwardOutput(logits=None, likeliest=logits.argmax(axis=1).astype(np.int32))


@pytest.mark.parametrize("log_probs", [False, True])
def test_a_runner_may_answer_with_the_likeliest_ids(log_probs: bool) -> None:
    runner = LikeliestRunner()
    engine, _ = make_engine(runner)
    enqueue(engine, [9, 8], 6)
    output_config = OutputConfig(return_log_probs=log_probs)
    request = Request(input_token_ids=(5,), max_tokens=9, output_config=output_config)
    engine.enqueue(other := engine.next_id(), request)
    heard: list[Response] = []
    while engine.loop.has_work:
        engine.loop.step()
        heard += engine.outbox.take(None, 0)
    assert ids_of([r for r in heard if r.request_id != other]) == expected_tokens([9, 8], 6)
    assert ids_of([r for r in heard if r.request_id == other]) == expected_tokens([5], 9)
    assert runner.needs == {log_probs}


def sampled(token_id: int) -> SampledTokens:
    return SampledTokens(np.array([token_id], dtype=np.int32), np.zeros(1, dtype=np.float32))


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_forward_thread_is_left_alone_until_its_work_is_launched(times: int) -> None:
    done: list[str] = []

    def work(launched: Callable[[], None]) -> SampledTokens:
        time.sleep(0.02)
        done.append("prepared")
        for _ in range(times):
            launched()
        return sampled(7)

    with ForwardThread() as lane:
        for number in range(1, 4):
            lane.start(work)
            assert len(done) == number
            assert lane.wait().token_ids.tolist() == [7]


def test_the_forward_thread_works_beside_its_caller() -> None:
    go_on = threading.Event()
    workers: list[threading.Thread] = []

    def work(launched: Callable[[], None]) -> SampledTokens:
        workers.append(threading.current_thread())
        launched()
        assert go_on.wait(5)
        return sampled(7)

    with ForwardThread() as lane:
        lane.start(work)
        go_on.set()
        assert lane.wait().token_ids.tolist() == [7]
        assert workers[0] is not threading.current_thread()
        lane.start(lambda launched: sampled(1 // 0))
        with pytest.raises(ZeroDivisionError):
            lane.wait()
        lane.start(lambda launched: sampled(8))
        assert lane.wait().token_ids.tolist() == [8]
    assert not workers[0].is_alive()
