"""What the executor refuses, each limit by its name."""

from __future__ import annotations

import threading

import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    Request,
    SamplingConfig,
)
from inflight.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedRequestError,
)
from tests.fakes.arithmetic_runner import VOCAB_SIZE, ArithmeticRunner, expected_tokens
from tests.fakes.executors import make_executor, wait_for


def test_queue_full_refuses_only_beyond_the_limit() -> None:
    go_on = threading.Event()
    runner = ArithmeticRunner(lambda inputs: go_on.wait(5) and None)
    with make_executor(runner, max_batch_size=2, max_queue_size=3) as executor:
        request = Request(input_token_ids=(1, 2), max_tokens=2)
        first = executor.enqueue_request(request)
        wait_for(lambda: runner.num_forwards == 1)
        taken = 0
        with pytest.raises(QueueFullError):
            for _ in range(20):
                executor.enqueue_request(request)
                taken += 1
        assert taken == 1 + 3, "one free slot, and three that wait"
        go_on.set()
        assert executor.await_responses(first, timeout=5)


def test_client_id_in_flight_is_refused() -> None:
    with make_executor() as executor:
        request = Request(input_token_ids=(1, 2), max_tokens=5, client_id="mine")
        request_id = executor.enqueue_request(request)
        with pytest.raises(DuplicateRequestError, match="mine"):
            executor.enqueue_request(request)
        assert executor.await_responses(request_id, timeout=5)[0].client_id == "mine"
        assert executor.enqueue_request(request) != request_id


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_tokens": 1000}, ["max_tokens", "max_seq_len", "200"]),
        ({"input_token_ids": tuple(range(200))}, ["input_ids", "max_seq_len"]),
        ({"input_token_ids": (VOCAB_SIZE,)}, ["input_ids", str(VOCAB_SIZE - 1)]),
        ({"input_token_ids": (-3,)}, ["input_ids", "-3"]),
        ({"end_ids": (5000,)}, ["end_id", "5000"]),
        ({"stop_token_sequences": ((5000,),)}, ["stop_words_list", "5000"]),
        ({"bad_words": ((5000,),)}, ["bad_words_list", "5000"]),
        ({"logit_bias": {5000: 1.0}}, ["embedding_bias", "5000"]),
        ({"sampling_config": SamplingConfig(beam_width=2)}, ["beam_width", "max_beam_width=1"]),
        ({"sampling_config": SamplingConfig(num_return_sequences=2)}, ["num_return_sequences"]),
    ],
)
def test_limits_refuse_by_name(fields: dict[str, object], names: list[str]) -> None:
    values: dict[str, object] = {"input_token_ids": (1, 2), "max_tokens": 3}
    with make_executor() as executor:
        with pytest.raises((InvalidRequestError, UnsupportedRequestError)) as caught:
            executor.enqueue_request(Request(**(values | fields)))  # type: ignore[arg-type]
        assert all(name in str(caught.value) for name in names), caught.value
        assert len(executor.generate([[1, 2]], max_tokens=2)) == 1


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with (
        make_executor(num_blocks=5) as executor,
        pytest.raises(InvalidRequestError, match="KV cache"),
    ):
        executor.enqueue_request(Request(input_token_ids=(1,) * 10, max_tokens=30))


def test_without_chunks_a_long_prompt_is_refused() -> None:
    with make_executor(enable_chunked_context=False) as executor:
        with pytest.raises(InvalidRequestError, match="enable_chunked_context"):
            executor.enqueue_request(Request(input_token_ids=(1,) * 17, max_tokens=3))
        output = executor.generate([[1] * 16], max_tokens=3)[0]
    assert list(output.token_ids) == expected_tokens([1] * 16, 3)


def test_without_chunks_a_replay_must_fit_where_pauses_may_happen() -> None:
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION
    with (
        make_executor(enable_chunked_context=False, policy=policy) as executor,
        pytest.raises(InvalidRequestError, match="replayed"),
    ):
        executor.enqueue_request(Request(input_token_ids=(1,) * 10, max_tokens=7))
