"""The public contract on both doors: right text, clean deltas, one final response, named errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.server.harness import MODELS, Client, GrpcStream
from tests.server.reference import Reference

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):\n",
)
COUNTING = {"text_input": "1, 2, 3, 4, 5,", "max_tokens": 24, "temperature": 0.0}


def test_every_model_is_ready(client: Client) -> None:
    for model in MODELS:
        assert client.call(f"/v2/models/{model}/ready")[0] == 200, model


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_models_own(
    client: Client, door: str, prompt: str, reference: Reference
) -> None:
    wanted = reference.greedy(prompt, 20)
    assert len(reference.greedy_ids(prompt, 20)) >= 5, "a prompt that says nothing"
    got = client.generate(door, text_input=prompt, max_tokens=20)["text_output"]
    assert got.startswith(wanted)


@pytest.mark.parametrize(
    "fields",
    [
        {"text_input": "1, 2, 3,", "temperature": 0.0},
        {"text_input": "Write in Chinese and emoji:", "temperature": 1.7, "seed": 7},
        {"text_input": "日本語で", "temperature": 1.9, "seed": 11},
        {"text_input": "🙂", "temperature": 2.0, "seed": 13},
    ],
)
def test_deltas_concatenate_to_the_whole(
    client: Client, door: str, fields: dict[str, object]
) -> None:
    ask = {"max_tokens": 48, "min_tokens": 24} | fields
    whole = client.generate(door, **ask)["text_output"]
    events = list(client.stream(door, stream=True, **ask))
    assert len(events) > 4, "not streamed"
    assert "".join(event["text_output"] for event in events) == whole
    assert [event["finish_reason"] for event in events[:-1]] == [""] * (len(events) - 1)
    assert events[-1]["text_output"] == ""
    assert events[-1]["finish_reason"] in ("length", "stop")


def test_grpc_stream_ends_with_one_final_that_carries_data(client: Client, door: str) -> None:
    with GrpcStream(client) as stream:
        stream.ask(door, "final-once", stream=True, **COUNTING)
        events = stream.events()
    assert all(event.error is None for event in events)
    assert [event.is_final for event in events].count(True) == 1
    assert events[-1].text == "" and events[-1].outputs["finish_reason"] == "length"


def test_without_streaming_grpc_gets_one_response(client: Client, door: str) -> None:
    with GrpcStream(client) as stream:
        stream.ask(door, **COUNTING)
        events = stream.events()
    assert len(events) == 1
    assert events[0].text == client.generate(door, **COUNTING)["text_output"]


@pytest.mark.parametrize("stop", [" 9, 1", "0, 11,", "8"])
def test_stop_words_match_on_text_and_never_leak(client: Client, door: str, stop: str) -> None:
    whole = client.generate(door, **COUNTING)["text_output"]
    wanted = whole[: whole.index(stop)]
    body = client.generate(door, stop_words=[stop], **COUNTING)
    assert (body["text_output"], body["finish_reason"], body["stop_reason"]) == (
        wanted,
        "stop",
        stop,
    )
    events = client.stream(door, stream=True, stop_words=["", stop], **COUNTING)
    assert "".join(event["text_output"] for event in events) == wanted


def test_bad_words_do_not_appear(client: Client, door: str) -> None:
    whole = client.generate(door, **COUNTING)["text_output"]
    assert "7" in whole
    assert "7" not in client.generate(door, bad_words=["7"], **COUNTING)["text_output"]


def test_embedding_bias_bans_and_forces(client: Client, door: str) -> None:
    ask = {"text_input": "The capital of France is", "max_tokens": 1}
    assert client.generate(door, **ask)["text_output"] == " Paris"
    biased = client.generate(
        door, embedding_bias_words=["Paris"], embedding_bias_weights=[-50.0], **ask
    )
    assert biased["text_output"] != " Paris"


def test_finish_reasons(client: Client, door: str) -> None:
    length = client.generate(door, text_input="1, 2, 3,", max_tokens=5)
    assert (length["finish_reason"], length["stop_reason"]) == ("length", "")
    ended = client.generate(door, text_input="The opposite of hot is", max_tokens=90)
    assert ended["finish_reason"] == "stop"
    assert "<|im_end|>" not in ended["text_output"]


def test_counts(client: Client, door: str, reference: Reference) -> None:
    ask = {
        "text_input": "The capital of France is",
        "max_tokens": 7,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    body = client.generate(door, **ask)
    assert body["num_input_tokens"] == reference.count("The capital of France is")
    assert body["num_output_tokens"] == 7
    events = list(client.stream(door, stream=True, **ask))
    assert sum(event["num_output_tokens"] for event in events) == 7
    assert {event["num_input_tokens"] for event in events} == {5}
    assert events[-1]["num_output_tokens"] == 0


@pytest.mark.parametrize("model", ["ensemble", "ensemble_sync"])
def test_retention_goes_through_the_ensembles(client: Client, model: str) -> None:
    ask = {
        "text_input": "The capital of France is",
        "max_tokens": 3,
        "retention_token_range_starts": [0],
        "retention_token_range_ends": [4],
    }
    priorities = "retention_token_range_priorities"
    said = client.refuse(model, **ask, **{priorities: [101]})
    assert priorities in said and "101" in said
    said = client.refuse(model, **ask, retention_decode_priority=101)
    assert "retention_decode_priority" in said and "101" in said
    kept = client.generate(model, **ask, **{priorities: [100]}, retention_decode_priority=0)
    assert kept["text_output"] == client.generate(model, **ask)["text_output"]


def test_seeds_and_their_alias(client: Client, door: str) -> None:
    ask = {
        "text_input": "My favourite food is",
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    one = client.generate(door, seed=5, **ask)["text_output"]
    assert client.generate(door, random_seed=5, **ask)["text_output"] == one
    assert client.generate(door, seed=6, **ask)["text_output"] != one
    assert client.generate(door, seed=0, **ask) == client.generate(door, seed=0, **ask)
    assert len({client.generate(door, **ask)["text_output"] for _ in range(3)}) > 1


def test_minimum_length_aliases(client: Client, door: str) -> None:
    ask = {"text_input": "The opposite of hot is", "max_tokens": 40}
    assert client.generate(door, **ask)["finish_reason"] == "stop"
    for name in ("min_tokens", "min_length"):
        body = client.generate(door, **{name: 40}, return_num_output_tokens=True, **ask)
        assert (body["finish_reason"], body["num_output_tokens"]) == ("length", 40), name


def test_log_probs_are_true_for_greedy(client: Client, door: str) -> None:
    body = client.generate(
        door, text_input="The capital of France is", max_tokens=4, return_log_probs=True
    )
    values = np.array(body["output_log_probs"]).reshape(-1)
    assert len(values) == 4 and (values < 0).all() and values[0] > -3
    assert float(np.array(body["cum_log_probs"]).reshape(-1)[0]) == pytest.approx(values.sum())


def test_echo(client: Client, door: str) -> None:
    ask = {"text_input": "The capital of France is", "max_tokens": 3}
    plain = client.generate(door, **ask)["text_output"]
    echoed = client.generate(door, exclude_input_in_output=False, **ask)["text_output"]
    assert echoed == ask["text_input"] + plain


def test_perf_metrics(client: Client, door: str) -> None:
    ask = {"text_input": "Once " * 80, "max_tokens": 3, "return_perf_metrics": True}
    first, again = client.generate(door, **ask), client.generate(door, **ask)
    assert again["kv_cache_reused_blocks"] >= 2
    assert (
        0
        < first["arrival_time_ns"]
        <= first["first_scheduled_time_ns"]
        <= first["first_token_time_ns"]
        <= first["last_token_time_ns"]
    )


def test_cache_salt_isolates(client: Client, door: str) -> None:
    ask = {"text_input": "Twice " * 80, "max_tokens": 2, "return_perf_metrics": True}
    client.generate(door, cache_salt=f"one tenant of {door}", **ask)
    other = client.generate(door, cache_salt=f"another of {door}", **ask)
    same = client.generate(door, cache_salt=f"another of {door}", **ask)
    assert (other["kv_cache_reused_blocks"], same["kv_cache_reused_blocks"] > 0) == (0, True)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_p", {"top_p": 1.5}),
        ("temperature", {"temperature": -1.0}),
        ("beam_width", {"beam_width": 0}),
        ("max_beam_width=1", {"beam_width": 2}),
        ("num_return_sequences", {"num_return_sequences": 3}),
        ("max_seq_len", {"max_tokens": 10_000_000}),
        ("min_p", {"min_p": -0.5}),
        ("priority", {"priority": 7.0}),
        ("end_id", {"end_id": 10_000_000}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("return_context_logits", {"return_context_logits": True}),
        ("return_generation_logits", {"return_generation_logits": True}),
        ("lora_task_id", {"lora_task_id": 3}),
        ("guided_decoding_guide_type", {"guided_decoding_guide_type": "json"}),
        ("text_input", {"text_input": ""}),
        ("stop_words", {"stop_words": ["x" * 5000]}),
        ("no_repeat_ngram_size", {"no_repeat_ngram_size": 3}),
        ("early_stopping", {"early_stopping": True}),
        ("noRepeatNgramSize", {"parameters": {"noRepeatNgramSize": 3}}),
    ],
)
def test_bad_fields_are_refused_by_name(
    client: Client, door: str, named: str, fields: dict[str, object]
) -> None:
    message = client.refuse(door, **({"text_input": "x", "max_tokens": 4} | fields))
    assert named in message
    assert "Traceback" not in message and "/" not in message.replace("and/or", "")
    assert client.generate(door, text_input="hi", max_tokens=2)["text_output"]


def test_unknown_parameters_are_tolerated(client: Client, door: str) -> None:
    body = client.generate(door, text_input="hi", max_tokens=2, whatever=3, user="me")
    assert body["text_output"]


def test_max_completion_tokens_is_read(client: Client, door: str) -> None:
    body = client.generate(
        door,
        text_input="1, 2,",
        parameters={"max_completion_tokens": 3},
        return_num_output_tokens=True,
    )
    assert body["num_output_tokens"] == 3


def test_batch_of_prompts_over_grpc(client: Client, door: str, reference: Reference) -> None:
    import tritonclient.grpc as grpc

    texts = list(PROMPTS[:3])
    inputs = [grpc.InferInput("text_input", [3, 1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([[t.encode()] for t in texts], dtype=np.object_))
    tokens = grpc.InferInput("max_tokens", [3, 1], "INT32")
    tokens.set_data_from_numpy(np.full((3, 1), 6, dtype=np.int32))
    with GrpcStream(client) as stream:
        stream._client.async_stream_infer(door, [*inputs, tokens])
        events = stream.events()
    assert len(events) == 3 and [e.is_final for e in events] == [False, False, True]
    by_place = {int(e.outputs["batch_index"]): e.text for e in events}
    for place, text in enumerate(texts):
        wanted = client.generate(door, text_input=text, max_tokens=6)["text_output"]
        assert by_place[place] == wanted


def test_messages_go_through_the_chat_template(
    client: Client, door: str, reference: Reference
) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = client.generate(
        door, messages=json.dumps(messages), max_tokens=12, return_num_input_tokens=True
    )
    prompt = reference.chat_prompt(messages)
    assert body["num_input_tokens"] == reference.count(prompt)
    assert body["text_output"].startswith(reference.greedy(prompt, 12)[:20])
    assert "messages" in client.refuse(door, messages="[1, 2", max_tokens=4)


def test_llama_index_style_request(client: Client) -> None:
    with GrpcStream(client) as stream:
        stream.ask(
            "ensemble",
            "1234567",
            text_input="The capital of France is",
            max_tokens=5,
            top_k=1,
            top_p=0.0,
            temperature=1.0,
            length_penalty=1.0,
            repetition_penalty=1.0,
            random_seed=0,
            beam_width=1,
            stream=True,
        )
        events = stream.events()
    assert "".join(e.text for e in events).startswith(" Paris")
