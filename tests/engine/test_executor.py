"""The real loop over the arithmetic model: right tokens whatever the policy, pool or company."""

from __future__ import annotations

import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    FinishReason,
    OutputConfig,
    Request,
)
from inflight.api.stats import BindingLimit
from tests.fakes.arithmetic_runner import VOCAB_SIZE, expected_tokens
from tests.fakes.executors import make_executor

POLICIES = list(CapacitySchedulerPolicy)


def prompts(count: int) -> list[list[int]]:
    """Different lengths, some with a common prefix."""
    common = [7, 11, 13, 17, 19, 23, 29, 31]
    return [
        (common if i % 3 == 0 else []) + [(i * 37 + j * 5) % VOCAB_SIZE for j in range(1 + i % 23)]
        for i in range(count)
    ]


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
    with make_executor(policy=policy, num_blocks=24) as executor:
        outputs = executor.generate(asked, max_tokens=60)
        paused = sum(
            stats.inflight_batching_stats.num_paused_requests
            for stats in executor.get_latest_iteration_stats()
        )
    assert paused > 0, "the pool was meant to be too small"
    assert [list(o.token_ids) for o in outputs] == [expected_tokens(p, 60) for p in asked]


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


def test_statistics_add_up() -> None:
    with make_executor(max_num_tokens=12) as executor:
        executor.generate([[1] * 20, [2, 3]], max_tokens=6)
        stats = executor.get_latest_iteration_stats()
        requests = executor.get_latest_request_stats()
        assert executor.get_latest_iteration_stats() == []
    assert sum(s.inflight_batching_stats.num_ctx_tokens for s in stats) == 22
    assert {(s.gpu_mem_usage, s.pinned_mem_usage) for s in stats} == {(7 << 30, 3 << 20)}
    assert sum(s.num_generated_tokens for s in stats) == 12
    assert sum(s.num_completed_requests for s in stats) == 2
    assert [s.iter for s in stats] == list(range(len(stats)))
    as_json = stats[0].to_json()
    assert {"iterLatencyMS", "kvCacheStats", "inflightBatchingStats"} <= as_json.keys()
    assert as_json["kvCacheStats"]["maxNumBlocks"] == 200
    assert requests and requests[0].request_stats[0].stage == "CONTEXT_IN_PROGRESS"


def test_a_static_batch_says_how_many_slots_stay_empty() -> None:
    with make_executor(policy=CapacitySchedulerPolicy.STATIC_BATCH, max_num_tokens=32) as executor:
        executor.generate([[1] * 20], max_tokens=3)
        static = [s.to_json()["staticBatchingStats"] for s in executor.get_latest_iteration_stats()]
    names = ("numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens")
    assert [tuple(each[name] for name in names) for each in static] == [
        (1, 1, 20, 0),
        (1, 0, 0, 1),
        (1, 0, 0, 1),
    ]
    assert {each["emptyGenSlots"] for each in static} == {8 - 1}


def test_statistics_say_how_full_a_batch_is_and_what_would_fill_it() -> None:
    with make_executor(max_num_tokens=12) as executor:
        executor.generate([[1] * 20, [2, 3]], max_tokens=6)
        stats = executor.get_latest_iteration_stats()
    batches = [s.inflight_batching_stats for s in stats]
    assert batches[0].row_fill == batches[0].num_scheduled_requests / 8
    assert batches[0].token_fill == 1.0
    assert batches[0].binding_limit is BindingLimit.TOKENS
    assert batches[-1].binding_limit is BindingLimit.QUEUE and batches[-1].token_fill < 0.2
    assert sum(s.new_active_requests_queue_latency_ms for s in stats) > 0
    assert stats[0].max_num_tokens_runtime == 12 and stats[0].max_batch_size_runtime == 8
