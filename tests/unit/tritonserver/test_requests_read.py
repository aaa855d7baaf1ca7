"""read_request: from tensors and parameters to canonical fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequestError, RequestError, UnsupportedRequestError
from inflight.tritonserver.contract import MAX_BATCH_SIZE, Dtype, InputField, field_of_parameter
from inflight.tritonserver.contract.refused import REFUSED
from inflight.tritonserver.parsed import Door
from inflight.tritonserver.requests import read_request
from tests.fakes import fake_pb_utils
from tests.unit.tritonserver.asking import asking, parsed


def test_the_text_door() -> None:
    raw = read_request(asking(text_input="hé", max_tokens=3, stream=True, request_id="r"))
    assert (raw.door, raw.stop, raw.streaming) == (Door.TEXT, False, True)
    assert raw.triton_request_id == "r"
    assert raw.elements == ({"text_input": "hé", "max_tokens": 3, "stream": True},)


def test_the_ids_door_under_the_engine_names() -> None:
    raw = read_request(
        asking(input_ids=[4, 5, 6], input_lengths=3, request_output_len=9, streaming=True)
    )
    assert raw.door is Door.IDS and raw.streaming
    (element,) = raw.elements
    assert element["input_ids"].tolist() == [4, 5, 6]
    assert (element["input_lengths"], element["max_tokens"]) == (3, 9)


def test_a_batch_has_an_element_for_each_row() -> None:
    raw = read_request(
        asking(
            batch=True,
            text_input=["a", "b"],
            stop_words=[["x", ""], ["y", "z"]],
            stream=[False, False],
        )
    )
    assert [element["text_input"] for element in raw.elements] == ["a", "b"]
    assert [element["stop_words"] for element in raw.elements] == [["x", ""], ["y", "z"]]


def test_arrays_outlive_the_memory_of_the_request() -> None:
    pb_request = asking(input_ids=[1, 2])
    raw = read_request(pb_request)
    pb_request.inputs()[0].as_numpy()[:] = 0
    assert raw.elements[0]["input_ids"].tolist() == [1, 2]


def test_wants() -> None:
    raw = read_request(asking(text_input="a", return_log_probs=True, return_num_input_tokens=True))
    assert raw.wants.log_probs and raw.wants.num_input_tokens
    assert not raw.wants.perf_metrics and not raw.wants.num_output_tokens
    old = read_request(asking(text_input="a", parameters={"return_kv_cache_reuse_stats": True}))
    assert old.wants.perf_metrics


@pytest.mark.parametrize(
    "request_of_stop",
    [
        asking(stop=True, request_id="r"),
        asking(stop=True, text_input="", max_tokens=1, request_id="r"),
        asking(stop=True, input_ids=[0], input_lengths=0, request_id="r"),
        asking(text_input="", parameters={"stop": True}, request_id="r"),
    ],
)
def test_a_stop_request_needs_nothing_else(request_of_stop: Any) -> None:
    raw = read_request(request_of_stop)
    assert raw.stop and raw.door is None
    assert raw.triton_request_id == "r"


@pytest.mark.parametrize("stop", [False, True])
def test_the_requested_outputs_are_read(stop: bool) -> None:
    asked = asking(text_input="a", stop=stop, requested_output_names=["text_output", "batch_index"])
    assert read_request(asked).requested_outputs == {"text_output", "batch_index"}


def test_stop_false_is_no_stop_request() -> None:
    assert not read_request(asking(stop=False, text_input="a")).stop


def test_parameters_count_and_unknown_ones_are_tolerated() -> None:
    raw = read_request(
        asking(
            text_input="a",
            parameters={
                "max_completion_tokens": 7,
                "topK": "5",
                "cacheSaltID": 12,
                "foo": "bar",
                "id": "x",
            },
        )
    )
    assert raw.elements == ({"text_input": "a", "max_tokens": 7, "top_k": 5, "cache_salt": "12"},)


def test_a_parameter_counts_for_every_element() -> None:
    raw = read_request(asking(batch=True, text_input=["a", "b"], parameters={"seed": 3}))
    assert [element["seed"] for element in raw.elements] == [3, 3]


def test_equal_values_under_two_names_are_fine() -> None:
    raw = read_request(asking(text_input="a", seed=4, random_seed=4, parameters={"seed": 4}))
    assert raw.elements[0]["seed"] == 4


def test_a_number_is_the_same_as_fp32_and_as_json() -> None:
    raw = read_request(asking(text_input="a", temperature=0.7, parameters={"temperature": 0.7}))
    assert raw.elements[0]["temperature"] == pytest.approx(0.7)
    both = {"temperature": 0.7, "sampling_parameters": '{"temperature": 0.7}'}
    assert parsed(asking(text_input="a", **both)).requests


@pytest.mark.parametrize(
    "contradiction",
    [
        {"seed": 4, "random_seed": 5},
        {"max_tokens": 4, "parameters": {"max_completion_tokens": 5}},
        {"top_p": 0.5, "runtime_top_p": 0.25},
        {"top_p": 0.5, "parameters": {"top_p": 0.50001}},
    ],
)
def test_contradicting_values_are_refused(contradiction: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="contradicts"):
        read_request(asking(text_input="a", **contradiction))


def test_the_shortest_time_limit_counts() -> None:
    pb_request = asking(
        text_input="a", timeout_us=9_000, timeout=7_000, parameters={"timeout": 8_000}
    )
    assert read_request(pb_request).elements[0]["timeout_us"] == 7_000


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_tokens": "many"}, "max_tokens: 'many' must be a number"),
        ({"max_tokens": True}, "max_tokens: True must be a number"),
        ({"max_tokens": 1.5}, "max_tokens: 1.5 must be a whole number"),
        ({"max_tokens": 2**31}, "max_tokens: 2147483648 must be between"),
        ({"seed": -1}, "seed: -1 must be between 0 and"),
        ({"temperature": "nan"}, "temperature: 'nan' must be a number"),
        ({"temperature": "9" * 5000}, "temperature: '999"),
        ({"stream": "perhaps"}, "stream: 'perhaps' must be true or false"),
        ({"text_input": False}, "text_input: False must be a string"),
        ({"messages": "\ud800"}, "messages: '...' is not valid UTF-8"),
        ({"input_token_ids": 3}, "input_token_ids: 3 must be sent as an input tensor"),
        ({"timeout": -1}, "timeout: -1 must be between"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_request(asking(parameters=parameters))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("text_input", np.array([[b"\xff"]], object), "is not valid UTF-8"),
        ("text_input", np.array([b"a"], object), "must have the shape [1, 1]"),
        ("text_input", np.array([[1]], np.int32), "must be of type STRING"),
        ("max_tokens", np.array([[1, 2]], np.int32), "must have the shape [1, 1]"),
        ("max_tokens", np.array([[b"1"]], object), "must be of type INT32"),
        ("max_tokens", np.zeros((0, 1), np.int32), "must have a batch axis"),
        ("max_tokens", np.zeros((MAX_BATCH_SIZE + 1, 1), np.int32), "must have a batch axis"),
        ("stop_words", np.full((1, 1025), b"a", object), "are too many: at most 1024"),
        ("embedding_bias", np.zeros((1, (1 << 21) + 1), np.float32), "are too many"),
        ("stop_words_list", np.zeros((1, 3, 1), np.int32), "must have the shape [1, 2, -1]"),
        ("stream", np.array(True), "must have a batch axis"),
    ],
)
def test_bad_tensors_are_named(name: str, array: np.ndarray, message: str) -> None:
    pb_request = fake_pb_utils.InferenceRequest(inputs=[fake_pb_utils.Tensor(name, array)])
    with pytest.raises(InvalidRequestError) as raised:
        read_request(pb_request)
    assert str(raised.value).startswith(f"{name}: ")
    assert message in str(raised.value)


def test_rows_of_different_batches_are_refused() -> None:
    pb_request = fake_pb_utils.InferenceRequest(
        inputs=[
            *asking(batch=True, text_input=["a", "b"]).inputs(),
            *asking(max_tokens=3).inputs(),
        ]
    )
    with pytest.raises(InvalidRequestError, match="max_tokens: .* must have the shape"):
        read_request(pb_request)


def test_a_batch_is_streamed_as_a_whole_or_not_at_all() -> None:
    with pytest.raises(InvalidRequestError, match="stream: .* the same for the whole batch"):
        read_request(asking(batch=True, text_input=["a", "b"], stream=[True, False]))


def test_an_input_of_no_contract_is_refused() -> None:
    pb_request = fake_pb_utils.InferenceRequest(
        inputs=[fake_pb_utils.Tensor("nonsense", np.zeros((1, 1), np.int32))]
    )
    with pytest.raises(UnsupportedRequestError, match="nonsense: there is no such input"):
        read_request(pb_request)


def _asking_value(entry: InputField) -> Any:
    """A value that no refused field calls neutral."""
    if entry.dtype is Dtype.STRING:
        return "something"
    return entry.dtype is Dtype.BOOL or 7


def _shaped(entry: InputField, value: Any) -> np.ndarray:
    shape = (1, *(1 if size < 0 else size for size in entry.dims))
    if entry.dtype is Dtype.STRING:
        return np.full(shape, str(value).encode(), object)
    return np.full(shape, value, entry.dtype.numpy)


REFUSED_TENSORS = [(name, entry) for entry in REFUSED for name in entry.tensor_names]
REFUSED_PARAMETERS = [
    (name, entry) for entry in REFUSED for name in (*entry.tensor_names, *entry.parameter_names)
]


@pytest.mark.parametrize(("name", "entry"), REFUSED_TENSORS, ids=lambda v: str(v)[:40])
def test_a_refused_tensor_gets_the_reason(name: str, entry: InputField) -> None:
    assert entry.refusal is not None
    inputs = [fake_pb_utils.Tensor(name, _shaped(entry, _asking_value(entry)))]
    with pytest.raises(UnsupportedRequestError) as raised:
        read_request(fake_pb_utils.InferenceRequest(inputs=inputs))
    assert str(raised.value) == f"{name}: {entry.refusal.reason}"


@pytest.mark.parametrize(("name", "entry"), REFUSED_PARAMETERS, ids=lambda v: str(v)[:40])
def test_a_refused_parameter_gets_the_reason(name: str, entry: InputField) -> None:
    assert entry.refusal is not None
    with pytest.raises(UnsupportedRequestError) as raised:
        read_request(asking(text_input="a", parameters={name: _asking_value(entry)}))
    assert str(raised.value) == f"{name}: {entry.refusal.reason}"


NEUTRAL = [
    (entry.field, value) for entry in REFUSED if entry.refusal for value in entry.refusal.neutral
]


@pytest.mark.parametrize(("field", "value"), NEUTRAL)
def test_values_that_ask_for_nothing_pass(field: str, value: Any) -> None:
    entry = field_of_parameter(field)
    assert entry is not None
    for name in entry.tensor_names:
        inputs = [
            fake_pb_utils.Tensor(name, _shaped(entry, value)),
            *asking(text_input="a").inputs(),
        ]
        raw = read_request(fake_pb_utils.InferenceRequest(inputs=inputs))
        assert raw.elements == ({"text_input": "a"},)
    if not entry.is_list:
        raw = read_request(asking(text_input="a", parameters={field: value}))
        assert raw.elements == ({"text_input": "a"},)


def test_the_text_of_the_refusal_that_the_contract_promises() -> None:
    with pytest.raises(UnsupportedRequestError) as raised:
        read_request(asking(text_input="a", beam_width=2))
    assert str(raised.value) == "beam_width: this engine was built with max_beam_width=1"


@pytest.mark.parametrize("name", ["beam_width", "num_return_sequences"])
def test_a_width_that_makes_no_sense_is_invalid(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}: 0 must be 1 or larger"):
        read_request(asking(text_input="a", **{name: 0}))


def test_a_huge_refused_tensor_is_not_walked_through() -> None:
    inputs = [fake_pb_utils.Tensor("runtime_top_p_reset_ids", np.full((1, 1 << 20), -1))]
    with pytest.raises(UnsupportedRequestError, match="top_p"):
        read_request(fake_pb_utils.InferenceRequest(inputs=inputs))


def test_an_empty_refused_tensor_asks_for_nothing() -> None:
    inputs = [
        fake_pb_utils.Tensor("lora_weights", np.zeros((1, 0, 0), np.float16)),
        *asking(text_input="a").inputs(),
    ]
    assert read_request(fake_pb_utils.InferenceRequest(inputs=inputs)).elements == (
        {"text_input": "a"},
    )


def test_text_and_ids_together_are_refused() -> None:
    with pytest.raises(RequestError, match="text_input: .* both given"):
        read_request(asking(text_input="a", input_ids=[1]))
