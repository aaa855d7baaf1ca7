"""The ensemble's last step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from inflight.text.stream import TextStream
from inflight.tritonserver.postprocessing import Postprocessing
from tests.fakes import fake_pb_utils
from tests.fakes.tokenizers import BACKENDS, make_tokenizer

Tensor = fake_pb_utils.Tensor


def step_request(
    prefix: Sequence[int], ids: Sequence[int], text_length: int, padding: int = 0
) -> fake_pb_utils.InferenceRequest:
    tokens = np.array([[[*ids, *[9] * padding]]], dtype=np.int32).reshape(1, 1, -1)
    return fake_pb_utils.InferenceRequest(
        inputs=[
            Tensor("TOKENS_BATCH", tokens),
            Tensor("SEQUENCE_LENGTH", np.array([[len(ids)]], dtype=np.int32)),
            Tensor("PREFIX_TOKENS", np.array([prefix], dtype=np.int32).reshape(1, -1)),
            Tensor("TEXT_LENGTH", np.array([[text_length]], dtype=np.int32)),
        ]
    )


def text_of(response: fake_pb_utils.InferenceResponse) -> str:
    error = response.error()
    assert error is None, error.message()
    (tensor,) = response.output_tensors()
    assert (tensor.name(), tensor.as_numpy().shape) == ("OUTPUT", (1,))
    return str(tensor.as_numpy()[0].decode())


@pytest.mark.parametrize("family", sorted(BACKENDS))
def test_deltas_become_the_engine_s_own_text(family: str) -> None:
    tokenizer = make_tokenizer(family)
    step = Postprocessing(tokenizer)
    stream = TextStream(tokenizer, tokenizer.encode("a b"), stop_words=["stop"])
    deltas = []
    for token_id in tokenizer.encode("the cab, stop. ab", add_special_tokens=False):
        if stream.append(token_id):
            break
        deltas.append(stream.take())
    deltas.append(stream.finish())
    for delta in deltas:
        request = step_request(delta.prefix_token_ids, delta.token_ids, delta.text_length)
        assert text_of(step.execute([request])[0]) == delta.text
    assert sum(bool(delta.text) for delta in deltas) > 1, "nothing was streamed"


BYTES = make_tokenizer("byte_level")
STEP = Postprocessing(BYTES)


def test_sequence_length_cuts_the_padding() -> None:
    ids = BYTES.encode("ab")
    assert text_of(STEP.execute([step_request((), ids, 2, padding=3)])[0]) == "ab"


def test_text_length_cuts_the_text() -> None:
    ids = BYTES.encode("the cab")
    assert text_of(STEP.execute([step_request((), ids, 5)])[0]) == "the c"


def test_an_empty_delta_is_an_empty_text() -> None:
    assert text_of(STEP.execute([step_request((), (), 0)])[0]) == ""
    dummy = step_request((), (), 0, padding=1)  # how the engine answers a stop request
    assert text_of(STEP.execute([dummy])[0]) == ""


def test_a_batch_gives_a_string_for_each_row() -> None:
    a, b = BYTES.encode("ab"), BYTES.encode("b")
    request = fake_pb_utils.InferenceRequest(
        inputs=[
            Tensor("TOKENS_BATCH", np.array([[a], [b]], dtype=np.int32)),
            Tensor("SEQUENCE_LENGTH", np.array([[1], [1]], dtype=np.int32)),
            Tensor("PREFIX_TOKENS", np.zeros((2, 0), dtype=np.int32)),
            Tensor("TEXT_LENGTH", np.array([[2], [1]], dtype=np.int32)),
        ]
    )
    (response,) = STEP.execute([request])
    assert response.output_tensors()[0].as_numpy().tolist() == [b"ab", b"b"]


@pytest.mark.parametrize(
    ("request_of_step", "message"),
    [
        (fake_pb_utils.InferenceRequest(), "TOKENS_BATCH: '' is missing"),
        (step_request((), (-1,), 1), "TOKENS_BATCH: -1 must be 0 or larger"),
        (step_request((), (1,), -1), "TEXT_LENGTH: -1 must be 0 or larger"),
        (
            fake_pb_utils.InferenceRequest(
                inputs=[Tensor("TOKENS_BATCH", np.zeros((1, 1), np.int32))]
            ),
            "TOKENS_BATCH: [1, 1] must have 3 axes",
        ),
    ],
)
def test_bad_inputs_are_named(
    request_of_step: fake_pb_utils.InferenceRequest, message: str
) -> None:
    good = step_request((), BYTES.encode("a"), 1)
    bad_response, good_response = STEP.execute([request_of_step, good])
    error = bad_response.error()
    assert error is not None and error.code() == fake_pb_utils.TritonError.INVALID_ARG
    assert error.message() == message
    assert text_of(good_response) == "a"
