"""The ensemble's first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.api.config import InflightConfig
from inflight.tritonserver.contract.models import PREPROCESSING_INPUTS, Dtype
from inflight.tritonserver.preprocessing import Preprocessing
from inflight.tritonserver.words import unflatten
from tests.fakes import fake_pb_utils
from tests.fakes.tokenizers import BACKENDS
from tests.unit.tritonserver.asking import TOKENIZER

STEP = Preprocessing(InflightConfig(max_input_chars=100), TOKENIZER)
TYPES = {joint.tensor.name: joint.tensor for joint in PREPROCESSING_INPUTS}
INVALID_ARG = fake_pb_utils.TritonError.INVALID_ARG


def step_request(**inputs: list[Any]) -> fake_pb_utils.InferenceRequest:
    """``inputs``: tensor -> rows, one for each batch element; str become bytes."""
    tensors = []
    for name, rows in inputs.items():
        dtype = TYPES[name].dtype
        if dtype is Dtype.STRING:
            rows = [[word.encode() for word in row] for row in rows]
        tensors.append(fake_pb_utils.Tensor(name, np.array(rows, dtype=dtype.numpy)))
    return fake_pb_utils.InferenceRequest(inputs=tensors)


def outputs_of(response: fake_pb_utils.InferenceResponse) -> dict[str, np.ndarray]:
    error = response.error()
    assert error is None, error.message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def run(**inputs: list[Any]) -> dict[str, np.ndarray]:
    (response,) = STEP.execute([step_request(**inputs)])
    return outputs_of(response)


def refusal(**inputs: list[Any]) -> str:
    (response,) = STEP.execute([step_request(**inputs)])
    error = response.error()
    assert error is not None and error.code() == INVALID_ARG
    return error.message()


def test_one_prompt() -> None:
    out = run(QUERY=[["a b"]])
    ids = TOKENIZER.encode("a b")
    assert out["INPUT_ID"].tolist() == [ids]
    assert out["REQUEST_INPUT_LEN"].tolist() == [[len(ids)]]
    assert out["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert out["EMBEDDING_BIAS"].shape == (1, 0)
    assert {name: array.dtype for name, array in out.items()} == {
        "INPUT_ID": np.int32,
        "REQUEST_INPUT_LEN": np.int32,
        "BAD_WORDS_IDS": np.int32,
        "EMBEDDING_BIAS": np.float32,
    }


def test_a_chat() -> None:
    out = run(MESSAGES=[['[{"role": "user", "content": "ab"}]']])
    assert out["INPUT_ID"].tolist() == [TOKENIZER.encode("user: ab\n")]


def test_a_batch_is_padded_to_the_longest() -> None:
    out = run(
        QUERY=[["a b ab"], ["a"]],
        BAD_WORDS_DICT=[["ab", "b"], ["b", ""]],
        EMBEDDING_BIAS_WORDS=[["a"], [""]],
        EMBEDDING_BIAS_WEIGHTS=[[2.0], [1.0]],
    )
    long, short = TOKENIZER.encode("a b ab"), TOKENIZER.encode("a")
    assert out["REQUEST_INPUT_LEN"].tolist() == [[len(long)], [len(short)]]
    assert out["INPUT_ID"].tolist() == [long, short + [0] * (len(long) - len(short))]

    first, second = out["BAD_WORDS_IDS"]
    spelled = {word: TOKENIZER.word_sequences(word) for word in ("ab", "b")}
    assert unflatten("x", first, 9) == spelled["ab"] + spelled["b"]
    assert unflatten("x", second, 9) == spelled["b"]

    biased = {i for ids in TOKENIZER.word_sequences("a") for i in ids}
    assert out["EMBEDDING_BIAS"].shape == (2, TOKENIZER.vocab_size)
    assert set(np.flatnonzero(out["EMBEDDING_BIAS"][0])) == biased
    assert set(out["EMBEDDING_BIAS"][0][sorted(biased)]) == {2.0}
    assert not out["EMBEDDING_BIAS"][1].any()


def test_weights_whose_sum_fp32_cannot_hold_become_its_largest_number() -> None:
    out = run(
        QUERY=[["a"]],
        EMBEDDING_BIAS_WORDS=[["a", "a"]],
        EMBEDDING_BIAS_WEIGHTS=[[3e38, 3e38]],
    )
    assert out["EMBEDDING_BIAS"].max() == np.finfo(np.float32).max


@pytest.mark.parametrize(
    "inputs",
    [
        {"STOP": [[True]]},
        {"STOP": [[True]], "QUERY": [[""]], "REQUEST_OUTPUT_LEN": [[1]]},
        {
            "STOP": [[True]],
            "STOP_INPUT_IDS": [[0]],
            "STOP_INPUT_LENGTHS": [[0]],
            "STOP_REQUEST_OUTPUT_LEN": [[0]],
        },
    ],
    ids=["bare", "with a text", "as llama-index sends it"],
)
def test_a_stop_request_passes_through(inputs: dict[str, list[Any]]) -> None:
    out = run(**inputs)
    assert out["INPUT_ID"].shape == (1, 0)
    assert out["REQUEST_INPUT_LEN"].tolist() == [[0]]
    assert out["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert out["EMBEDDING_BIAS"].shape == (1, 0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"REQUEST_OUTPUT_LEN": [[4]]}, "text_input: '' is missing"),
        ({"QUERY": [[""]]}, "text_input: '' is empty"),
        ({"QUERY": [["x" * 101]]}, "text_input: '101 characters' are too many"),
        ({"MESSAGES": [["{"]]}, "messages: "),
        ({"QUERY": [["a"]], "STOP_INPUT_IDS": [[1]]}, "input_ids: the ensemble takes"),
        ({"QUERY": [["a"]], "BAD_WORDS_DICT": [["x" * 1025]]}, "bad_words: "),
        ({"QUERY": [["a"]], "EMBEDDING_BIAS_WORDS": [["a"]]}, "embedding_bias_weights: 0"),
    ],
)
def test_errors_name_the_public_field(inputs: dict[str, list[Any]], message: str) -> None:
    assert refusal(**inputs).startswith(message)


def test_a_bad_request_leaves_its_neighbours_alone() -> None:
    responses = STEP.execute(
        [step_request(QUERY=[["a"]]), step_request(QUERY=[[""]]), step_request(QUERY=[["b"]])]
    )
    assert [response.has_error() for response in responses] == [False, True, False]
    assert outputs_of(responses[2])["INPUT_ID"].tolist() == [TOKENIZER.encode("b")]


def test_our_own_faults_are_answered_without_their_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("/secret/path")

    monkeypatch.setattr("inflight.tritonserver.preprocessing.prompt_ids", fail)
    (response,) = STEP.execute([step_request(QUERY=[["a"]])])
    error = response.error()
    assert error is not None and error.code() == fake_pb_utils.TritonError.INTERNAL
    assert "secret" not in error.message()
    assert "a request failed" in caplog.text


def test_the_text_steps_never_import_torch(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """As their stubs start: from a checkpoint, to the first answer."""
    checkpoint = save_checkpoint(tmp_path)
    program = f"""
import sys
from tests.fakes import fake_pb_utils
sys.modules["triton_python_backend_utils"] = fake_pb_utils
import numpy as np
from inflight.tritonserver.preprocessing import Preprocessing
from inflight.tritonserver.postprocessing import Postprocessing
import inflight.tritonserver.sync
query = fake_pb_utils.Tensor("QUERY", np.array([[b"a b"]], dtype=object))
step = Preprocessing.start({{"model_dir": {str(checkpoint)!r}}})
(response,) = step.execute([fake_pb_utils.InferenceRequest(inputs=[query])])
assert response.error() is None, response.error().message()
Postprocessing.start({{"model_dir": {str(checkpoint)!r}}})
print(sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def save_checkpoint(directory: Path) -> Path:
    """A folder that a tokenizer can be loaded from; its weights are never read."""
    (directory / "model.safetensors").touch()
    BACKENDS["byte_level"]().save(str(directory / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": TOKENIZER.vocab_size,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
