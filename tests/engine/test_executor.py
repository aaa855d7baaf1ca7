"""The real loop over the arithmetic model: right tokens whatever the policy, pool or company."""

from __future__ import annotations

import threading
import time

import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
)
from inflight.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    ShuttingDownError,
    UnsupportedRequestError,
)
from inflight.executor import Executor
from tests.fakes.arithmetic_runner import VOCAB_SIZE, ArithmeticRunner, expected_tokens

POLICIES = list(CapacitySchedulerPolicy)


def make_executor(
    runner: ArithmeticRunner | None = None,
    *,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
    num_blocks: int = 200,
    tokens_per_block: int = 4,
    end_ids: tuple[int, ...] = (),
    **limits: object,
) -> Executor:
    values: dict[str, object] = {
        "max_batch_size": 8,
        "max_num_tokens": 16,
        "max_seq_len": 200,
        "request_stats_max_iterations": 10,
    }
    config = ExecutorConfig(
        **(values | limits),  # type: ignore[arg-type]
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=policy, context_chunking_policy=chunking
        ),
        kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block, num_blocks=num_blocks),
    )
    return Executor(runner or ArithmeticRunner(), config, end_ids=end_ids)


def prompts(count: int) -> list[list[int]]:
    """Different lengths, some with a common prefix."""
    common = [7, 11, 13, 17, 19, 23, 29, 31]
    return [
        (common if i % 3 == 0 else []) + [(i * 37 + j * 5) % VOCAB_SIZE for j in range(1 + i % 23)]
        for i in range(count)
    ]


def wait_for(condition: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunking", list(ContextChunkingPolicy))
@pytest.mark.parametrize("num_blocks", [16, 200])
def test_tokens_are_right_whatever_the_policy(
    policy: CapacitySchedulerPolicy, chunking: ContextChunkingPolicy, num_blocks: int
) -> None:
    asked = prompts(40)
    with make_executor(policy=policy, chunking=chunking, num_blocks=num_blocks) as executor:
        outputs = executor.generate(asked, max_tokens=25)
        assert executor.kv_cache_stats().used_num_blocks == 0
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, 25)
        assert output.finish_reason is FinishReason.LENGTH
        assert (output.num_input_tokens, output.num_output_tokens) == (len(prompt), 25)


def test_a_tiny_pool_pauses_and_still_answers_right() -> None:
    asked = prompts(12)
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION
    with make_executor(policy=policy, num_blocks=18) as executor:
        outputs = executor.generate(asked, max_tokens=30)
        paused = sum(
            stats.inflight_batching_stats.num_paused_requests
            for stats in executor.get_latest_iteration_stats()
        )
    assert paused > 0, "the pool was meant to be too small"
    assert [list(o.token_ids) for o in outputs] == [expected_tokens(p, 30) for p in asked]


def test_equal_prompts_reuse_blocks() -> None:
    prompt = list(range(1, 22))
    with make_executor() as executor:
        first = executor.generate([prompt], max_tokens=5)[0]
        before = executor.kv_cache_stats()
        again = executor.generate([prompt], max_tokens=5)[0]
        after = executor.kv_cache_stats()
    assert first.token_ids == again.token_ids == tuple(expected_tokens(prompt, 5))
    assert after.reused_blocks - before.reused_blocks == 5


def test_end_id_ends_and_is_not_counted() -> None:
    prompt = [5, 6, 7]
    end = expected_tokens(prompt, 9)[8]
    assert end not in expected_tokens(prompt, 8)
    with make_executor(end_ids=(end,)) as executor:
        output = executor.generate([prompt], max_tokens=50)[0]
    assert output.token_ids == tuple(expected_tokens(prompt, 8))
    assert output.finish_reason is FinishReason.END_ID
    assert output.stop_reason == str(end)


def test_end_ids_of_the_request_win() -> None:
    prompt = [5, 6, 7]
    with make_executor(end_ids=(expected_tokens(prompt, 3)[2],)) as executor:
        output = executor.generate([prompt], max_tokens=6, end_ids=())[0]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.num_output_tokens == 6


def test_stop_token_sequence_is_not_sent() -> None:
    prompt = [9, 8]
    tokens = expected_tokens(prompt, 10)
    with make_executor() as executor:
        output = executor.generate(
            [prompt], max_tokens=10, stop_token_sequences=(tuple(tokens[4:6]),)
        )[0]
    assert list(output.token_ids) == tokens[:4]
    assert output.finish_reason is FinishReason.STOP_WORDS


def test_streaming_delivers_each_token_once() -> None:
    prompt = [3, 1, 4, 1, 5]
    with make_executor() as executor:
        request_id = executor.enqueue_request(
            Request(input_token_ids=tuple(prompt), max_tokens=40, streaming=True)
        )
        parts = []
        while not parts or not parts[-1].is_final:
            parts += [r.result for r in executor.await_responses(request_id, timeout=5)]
    tokens = [token for part in parts for token in part.output_token_ids]
    assert tokens == expected_tokens(prompt, 40)
    assert sum(part.num_output_tokens for part in parts) == 40
    assert [part.is_final for part in parts].count(True) == 1


def test_without_streaming_there_is_one_response() -> None:
    with make_executor() as executor:
        request_id = executor.enqueue_request(Request(input_token_ids=(1, 2), max_tokens=20))
        responses = executor.await_responses(request_id, timeout=5)
        assert len(responses) == 1 and responses[0].is_final
        assert executor.await_responses(request_id, timeout=0.05) == []


def test_echo_puts_the_prompt_first() -> None:
    with make_executor() as executor:
        output = executor.generate(
            [[4, 5, 6]],
            max_tokens=3,
            output_config=OutputConfig(exclude_input_from_output=False),
        )[0]
    assert list(output.token_ids) == [4, 5, 6, *expected_tokens([4, 5, 6], 3)]
    assert output.num_output_tokens == 3


def test_log_probs_one_for_each_token() -> None:
    with make_executor() as executor:
        output = executor.generate(
            [[4, 5, 6]], max_tokens=7, output_config=OutputConfig(return_log_probs=True)
        )[0]
    assert len(output.log_probs) == 7
    assert all(-0.1 < value < 0 for value in output.log_probs)


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


def test_queue_limit_counts_those_that_must_wait() -> None:
    go_on = threading.Event()
    runner = ArithmeticRunner(lambda inputs: go_on.wait(5) and None)
    with make_executor(runner, max_batch_size=2, max_queue_size=3) as executor:
        request = Request(input_token_ids=(1, 2), max_tokens=2)
        accepted = [executor.enqueue_request(request) for _ in range(2)]
        wait_for(lambda: runner.num_forwards == 1)
        with pytest.raises(QueueFullError, match="max_queue_size"):
            accepted += [executor.enqueue_request(request) for _ in range(9)]
        go_on.set()
        for request_id in accepted:
            assert executor.await_responses(request_id, timeout=5)[0].is_final
        assert executor.enqueue_request(request) > 0


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
        executor._engine.loop._parts.scheduler, "schedule", lambda *a, **k: 1 / 0, raising=True
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


def test_statistics_add_up() -> None:
    with make_executor(max_num_tokens=12) as executor:
        executor.generate([[1] * 20, [2, 3]], max_tokens=6)
        stats = executor.get_latest_iteration_stats()
        requests = executor.get_latest_request_stats()
        assert executor.get_latest_iteration_stats() == []
    assert sum(s.inflight_batching_stats.num_ctx_tokens for s in stats) == 22
    assert sum(s.num_generated_tokens for s in stats) == 12
    assert sum(s.num_completed_requests for s in stats) == 2
    assert [s.iter for s in stats] == list(range(len(stats)))
    as_json = stats[0].to_json()
    assert {"iterLatencyMS", "kvCacheStats", "inflightBatchingStats"} <= as_json.keys()
    assert as_json["kvCacheStats"]["maxNumBlocks"] == 200
    assert requests and requests[0].request_stats[0].stage == "CONTEXT_IN_PROGRESS"
