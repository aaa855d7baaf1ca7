"""build_requests: from canonical fields to the engine's Requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from inflight.api.config import InflightConfig
from inflight.api.request import Request
from inflight.errors import InvalidRequestError, UnsupportedRequestError
from inflight.tritonserver.contract import SERVED_INPUTS
from inflight.tritonserver.requests import build_requests, read_request
from tests.fakes.tokenizers import make_tokenizer
from tests.unit.tritonserver.asking import TOKENIZER, asking, built, parsed

CONFIG = InflightConfig()
WORD_AB = TOKENIZER.word_sequences("ab")


def test_a_bare_prompt_gets_the_defaults() -> None:
    request = built(text_input="a b")
    assert request.input_token_ids == tuple(TOKENIZER.encode("a b"))
    assert request.max_tokens == CONFIG.default_max_tokens
    assert request.sampling_config.is_greedy
    assert request.output_config.exclude_input_from_output
    assert not request.output_config.return_log_probs
    assert (request.end_ids, request.client_id, request.allotted_time_ms) == (None, None, None)
    assert request.stop_words == request.bad_words == request.stop_token_sequences == ()
    assert dict(request.logit_bias) == {}


def _sampling(name: str) -> Callable[[Request], Any]:
    return lambda request: getattr(request.sampling_config, name)


EFFECTS: dict[str, tuple[Any, Callable[[Request], Any], Any]] = {
    "text_input": ("ab", lambda r: r.input_token_ids, tuple(TOKENIZER.encode("ab"))),
    "messages": (
        '[{"role": "user", "content": "ab"}]',
        lambda r: r.input_token_ids,
        tuple(TOKENIZER.encode("user: ab\n")),
    ),
    "input_ids": ([3, 4], lambda r: r.input_token_ids, (3, 4)),
    "cache_salt": ("mine", lambda r: r.cache_salt, "mine"),
    "max_tokens": (9, lambda r: r.max_tokens, 9),
    "min_tokens": (3, _sampling("min_tokens"), 3),
    "end_id": (5, lambda r: r.end_ids, (5,)),
    "stop_words": (["x", "", "y", "x"], lambda r: r.stop_words, ("x", "y")),
    "stop_words_list": (
        [[1, 2, 3], [1, 3, -1]],
        lambda r: r.stop_token_sequences,
        ((1,), (2, 3)),
    ),
    "temperature": (0.5, _sampling("temperature"), 0.5),
    "top_k": (4, _sampling("top_k"), 4),
    "top_p": (0.25, _sampling("top_p"), 0.25),
    "min_p": (0.125, _sampling("min_p"), 0.125),
    "seed": (2**64 - 1, _sampling("seed"), 2**64 - 1),
    "repetition_penalty": (1.5, _sampling("repetition_penalty"), 1.5),
    "presence_penalty": (0.5, _sampling("presence_penalty"), 0.5),
    "frequency_penalty": (-0.5, _sampling("frequency_penalty"), -0.5),
    "bad_words": (["ab", ""], lambda r: r.bad_words, WORD_AB),
    "bad_words_list": ([[7, 8], [2, -1]], lambda r: r.bad_words, ((7, 8),)),
    "embedding_bias": ([0.0, 1.5, 0.0], lambda r: dict(r.logit_bias), {1: 1.5}),
    "sampling_parameters": ('{"top_k": "7"}', _sampling("top_k"), 7),
    "priority": (0.75, lambda r: r.priority, 0.75),
    "timeout_us": (1500, lambda r: r.allotted_time_ms, 1.5),
    "stream": (True, lambda r: r.streaming, True),
    "exclude_input_in_output": (
        False,
        lambda r: r.output_config.exclude_input_from_output,
        False,
    ),
    "return_log_probs": (True, lambda r: r.output_config.return_log_probs, True),
    "return_perf_metrics": (True, lambda r: r.output_config.return_perf_metrics, True),
}
"""Field -> a value, what it changes in the Request, and to what."""

SEEN_ELSEWHERE = {
    **{e.field: "test_retention.py" for e in SERVED_INPUTS if e.field.startswith("retention_")},
    "input_lengths": "test_input_lengths_cuts_the_padding",
    "embedding_bias_words": "test_words_get_their_weights",
    "embedding_bias_weights": "test_words_get_their_weights",
    "allotted_time_ms": "test_the_shortest_time_limit_counts",
    "pad_id": "test_pad_id_is_accepted",
    "stop": "test_requests_read.py",
    "return_num_input_tokens": "test_requests_read.py",
    "return_num_output_tokens": "test_requests_read.py",
}


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, e.field) for e in SERVED_INPUTS if e.field in EFFECTS for name in e.tensor_names],
)
def test_every_served_name_has_its_effect(name: str, field: str) -> None:
    value, effect, expected = EFFECTS[field]
    assert effect(built(**{name: value})) == expected


def test_no_served_field_is_without_a_test() -> None:
    assert {entry.field for entry in SERVED_INPUTS} == {*EFFECTS, *SEEN_ELSEWHERE}


def test_pad_id_is_accepted() -> None:
    assert built(pad_id=0) == built()


def test_input_lengths_cuts_the_padding() -> None:
    requests = parsed(
        asking(batch=True, input_ids=[[1, 2, 3], [4, 0, 0]], input_lengths=[3, 1])
    ).requests
    assert [request.input_token_ids for request in requests] == [(1, 2, 3), (4,)]


@pytest.mark.parametrize("length", [0, -1, 4])
def test_input_lengths_outside_the_ids_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"input_lengths: {length} must be between 1"):
        built(input_ids=[1, 2, 3], input_lengths=length)


def test_a_batch_becomes_requests_of_their_own() -> None:
    result = parsed(asking(batch=True, text_input=["a", "b"], max_tokens=[1, 2], request_id="r"))
    assert [request.max_tokens for request in result.requests] == [1, 2]
    assert [request.client_id for request in result.requests] == ["r[0]", "r[1]"]
    assert result.triton_request_id == "r"
    assert built(request_id="r").client_id == "r"


def test_words_get_their_weights() -> None:
    request = built(
        embedding_bias_words=["ab", "", "a"],
        embedding_bias_weights=[2.0, 9.0, -1.0],
        embedding_bias=[0.5],
        sampling_parameters='{"logit_bias": {"0": 1, "3": "0.25"}}',
    )
    tokens = {name: _tokens_of(name) for name in ("ab", "a")}
    expected = {0: 1.5, 3: 0.25}
    for token_id in tokens["ab"] | tokens["a"]:
        bias = 2.0 * (token_id in tokens["ab"]) - 1.0 * (token_id in tokens["a"])
        expected[token_id] = expected.get(token_id, 0.0) + bias
    assert dict(request.logit_bias) == expected


def _tokens_of(word: str) -> set[int]:
    return {token_id for ids in TOKENIZER.word_sequences(word) for token_id in ids}


def test_the_shortest_time_limit_counts() -> None:
    assert built(timeout=5_000, parameters={"allottedTimeMs": 2.5}).allotted_time_ms == 2.5
    assert built(timeout=2_000, parameters={"allottedTimeMs": 2.5}).allotted_time_ms == 2.0


def test_end_id_minus_one_means_none() -> None:
    assert built(end_id=-1).end_ids == ()
    assert built(sampling_parameters='{"ignore_eos": "true"}').end_ids == ()
    assert built(sampling_parameters='{"ignore_eos": false}').end_ids is None


@pytest.mark.parametrize("end_id", [-2, TOKENIZER.vocab_size])
def test_end_ids_outside_the_vocabulary_are_refused(end_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"end_id: {end_id} must be -1"):
        built(end_id=end_id)


def test_the_default_of_max_tokens_gives_way_to_max_seq_len() -> None:
    config = InflightConfig(max_seq_len=10, default_max_tokens=256)
    assert built(config, input_ids=[1] * 4).max_tokens == 6
    assert built(config, input_ids=[1] * 12).max_tokens == 1
    assert built(config, input_ids=[1] * 4, max_tokens=99).max_tokens == 99


def test_the_configuration_decides_about_the_prompt_in_the_answer() -> None:
    config = InflightConfig(exclude_input_in_output=False)
    assert not built(config).output_config.exclude_input_from_output
    asked = built(config, exclude_input_in_output=True)
    assert asked.output_config.exclude_input_from_output


def test_sampling_parameters_are_read_as_vllm_clients_send_them() -> None:
    request = built(
        sampling_parameters='{"max_tokens": "12", "min_tokens": "2", "temperature": "0.5",'
        ' "top_k": -1, "stop": "x", "stop_token_ids": [5, 6], "bad_words": ["ab"], "n": 1,'
        ' "seed": null, "logprobs": null, "skip_special_tokens": true}'
    )
    sampling = request.sampling_config
    assert (request.max_tokens, sampling.min_tokens, sampling.temperature) == (12, 2, 0.5)
    assert (sampling.top_k, sampling.seed) == (None, None)
    assert (request.stop_words, request.stop_token_sequences) == (("x",), ((5,), (6,)))
    assert request.bad_words == WORD_AB


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{", "sampling_parameters: '{' is not valid JSON"),
        ("[" * 60_000, "sampling_parameters: "),
        ("[1]", "sampling_parameters: '[1]' must be a JSON object"),
        (" " * 65_537, "sampling_parameters: '65537 characters' are too many"),
        ('{"max_tokns": 3}', "sampling_parameters: 'max_tokns' is not a sampling parameter"),
        ('{"stream": true}', "sampling_parameters: 'stream' is not a sampling parameter"),
        ('{"text_input": "x"}', "sampling_parameters: 'text_input' is not a sampling parameter"),
        ('{"n": 2}', "n: one sequence is returned"),
        ('{"logprobs": "5"}', "logprobs: return_log_probs gives"),
        ('{"temperature": "hot"}', "temperature: 'hot' must be a number"),
        ('{"stop": ["x", 1.5, true]}', "stop: True must be a string"),
        ('{"stop_token_ids": 5}', "stop_token_ids: 5 must be a list"),
        ('{"stop_token_ids": ["x"]}', "stop_token_ids: 'x' must be a number"),
        ('{"logit_bias": {"x": 1}}', "logit_bias: 'x' must be a number"),
        ('{"logit_bias": [1]}', "logit_bias: [1] must be an object"),
        ('{"ignore_eos": "perhaps"}', "ignore_eos: 'perhaps' must be true or false"),
        ('{"max_tokens": 3, "maxTokens": 4}', "maxTokens: 4 contradicts"),
        ('{"guided_decoding": {"json": "x"}}', "guided_decoding: guided decoding is not served"),
    ],
)
def test_bad_sampling_parameters_are_named(parameters: str, message: str) -> None:
    with pytest.raises((InvalidRequestError, UnsupportedRequestError)) as raised:
        built(sampling_parameters=parameters)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_tokens": -1}, "max_tokens: -1 must be 1 or larger"),
        ({"temperature": -1.0}, "temperature: -1.0 must be between 0 and 1e6"),
        ({"temperature": 1e30}, "temperature: 1.0000000150474662e+30 must be between 0 and 1e6"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 1.5}, "top_p: 1.5 must be between 0 and 1"),
        ({"top_k": -1}, "top_k: -1 must be 0 or larger"),
        ({"min_p": 2.0}, "min_p: 2.0 must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 must be between 1e-6 and"),
        ({"presence_penalty": 1e7}, "presence_penalty: 10000000.0 must be within +-1e6"),
        ({"frequency_penalty": -1e7}, "frequency_penalty: -10000000.0 must be within +-1e6"),
        ({"priority": 1.5}, "priority: 1.5 must be between 0 and 1"),
        ({"timeout_us": 0}, "timeout_us: 0 must be larger than 0"),
        ({"cache_salt": "x" * 257}, "cache_salt: '257 characters' is too long"),
        ({"stop_words": [str(i) for i in range(65)]}, "stop_words: 65 words: at most 64"),
        ({"bad_words": ["x" * 1025]}, "bad_words: 'xxx"),
        ({"stop_words_list": [[1, 2], [2, 1]]}, "stop_words_list: 1 in row 1 must be above 2"),
        ({"stop_words_list": [[1, 2], [0, 1]]}, "stop_words_list: 0 in row 1 must be above 0"),
        ({"bad_words_list": [[1, 2], [3, -1]]}, "bad_words_list: 3 in row 1 must be above 0"),
        ({"bad_words_list": [[1, 2], [-1, 2]]}, "bad_words_list: 'row 1' has an end after"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: 0 values for 1 words"),
        ({"embedding_bias_weights": [1.0]}, "embedding_bias_weights: 1 values for 0 words"),
        (
            {"embedding_bias_words": ["a"], "embedding_bias_weights": [float("nan")]},
            "embedding_bias_weights: nan must be finite",
        ),
        ({"bad_words": [f"a{i}" for i in range(600)]}, "bad_words: 1200 token sequences are too"),
        ({"bad_words": [f"{i:0700}" for i in range(100)]}, "bad_words: '70000 characters' in all"),
        ({"bad_words_list": [[1] * 1025, list(range(1, 1026))]}, "bad_words_list: 1025 words: at"),
        ({"stop_words_list": [[1] * 65, list(range(1, 66))]}, "stop_words_list: 65 words: at most"),
        ({"embedding_bias": [float("inf")]}, "embedding_bias: inf (id 0) is not finite"),
        ({"text_input": ""}, "text_input: '' is empty: a prompt needs at least one token"),
        ({"text_input": "a", "messages": "[]"}, "messages: '...' and text_input are both given"),
        ({"messages": "no JSON"}, "messages: "),
        ({"input_ids": []}, "input_ids: [] is empty"),
    ],
)
def test_bad_values_are_named_with_their_limit(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        built(**asked)
    assert str(raised.value).startswith(message)


def test_a_request_without_a_prompt_says_what_it_lacks() -> None:
    with pytest.raises(InvalidRequestError, match="text_input: '' is missing: send text_input"):
        parsed(asking(max_tokens=4))


def test_an_empty_text_beside_messages_is_no_text() -> None:
    chat = '[{"role": "user", "content": "a"}]'
    assert built(text_input="", messages=chat) == built(messages=chat)


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_bos() -> None:
    llama = make_tokenizer("llama")
    raw = read_request(asking(text_input=""))
    (request,) = build_requests(raw, llama, CONFIG).requests
    assert request.input_token_ids == tuple(llama.encode(""))
    assert len(request.input_token_ids) == 1


@pytest.mark.parametrize("name", ["text_input", "messages"])
def test_long_texts_are_refused_before_they_are_tokenized(name: str) -> None:
    config = InflightConfig(max_input_chars=5)
    with pytest.raises(InvalidRequestError, match=f"{name}: '6 characters' are too many"):
        built(config, **{name: "x" * 6})


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"text_input": "a"}, "text_input"),
        ({"messages": "[]"}, "messages"),
        ({"input_ids": [1], "stop_words": ["x"]}, "stop_words"),
        ({"input_ids": [1], "bad_words": ["x"]}, "bad_words"),
        (
            {"input_ids": [1], "embedding_bias_words": ["x"], "embedding_bias_weights": [1.0]},
            "embedding_bias_words",
        ),
    ],
)
def test_texts_are_refused_without_a_tokenizer(asked: dict[str, Any], field: str) -> None:
    raw = read_request(asking(**asked))
    with pytest.raises(UnsupportedRequestError, match=f"{field}: the checkpoint has no tokenizer"):
        build_requests(raw, None, CONFIG)


def test_ids_need_no_tokenizer() -> None:
    raw = read_request(asking(input_ids=[1, 2], end_id=5, stop_words=[""]))
    (request,) = build_requests(raw, None, CONFIG).requests
    assert (request.input_token_ids, request.end_ids, request.stop_words) == ((1, 2), (5,), ())


def test_a_stop_request_has_nothing_to_build() -> None:
    raw = replace(read_request(asking(text_input="a")), door=None, stop=True)
    with pytest.raises(AssertionError):
        build_requests(raw, TOKENIZER, CONFIG)
