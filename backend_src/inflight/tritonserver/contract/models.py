"""Which model of the repository declares which tensors, and how the ensemble joins them.

The ensemble's fields go straight to ``inflight_llm`` under their own names, but for those that
``preprocessing`` turns into ids first.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from inflight.tritonserver.contract import INPUTS, OUTPUTS, TEXT_OUTPUT, Dtype


class Model(Enum):
    """The models of the repository, by folder name."""

    INFLIGHT_LLM = "inflight_llm"
    ENSEMBLE = "ensemble"
    PREPROCESSING = "preprocessing"
    POSTPROCESSING = "postprocessing"
    ENSEMBLE_SYNC = "ensemble_sync"


class Declared(NamedTuple):
    """A tensor as a config.pbtxt declares it; ``dims`` without the batch axis."""

    name: str
    dtype: Dtype
    dims: tuple[int, ...]


class Joint(NamedTuple):
    """A tensor of a step, and the tensor of the ensemble that it is joined to."""

    tensor: Declared
    ensemble_name: str


QUERY = Declared("QUERY", Dtype.STRING, (1,))
MESSAGES = Declared("MESSAGES", Dtype.STRING, (1,))
BAD_WORDS_DICT = Declared("BAD_WORDS_DICT", Dtype.STRING, (-1,))
EMBEDDING_BIAS_WORDS = Declared("EMBEDDING_BIAS_WORDS", Dtype.STRING, (-1,))
EMBEDDING_BIAS_WEIGHTS = Declared("EMBEDDING_BIAS_WEIGHTS", Dtype.FP32, (-1,))
REQUEST_OUTPUT_LEN = Declared("REQUEST_OUTPUT_LEN", Dtype.INT32, (1,))
STOP = Declared("STOP", Dtype.BOOL, (1,))
STOP_INPUT_IDS = Declared("STOP_INPUT_IDS", Dtype.INT32, (-1,))
STOP_INPUT_LENGTHS = Declared("STOP_INPUT_LENGTHS", Dtype.INT32, (1,))
STOP_REQUEST_OUTPUT_LEN = Declared("STOP_REQUEST_OUTPUT_LEN", Dtype.UINT32, (1,))

PREPROCESSING_INPUTS: tuple[Joint, ...] = (
    Joint(QUERY, "text_input"),
    Joint(MESSAGES, "messages"),
    Joint(BAD_WORDS_DICT, "bad_words"),
    Joint(EMBEDDING_BIAS_WORDS, "embedding_bias_words"),
    Joint(EMBEDDING_BIAS_WEIGHTS, "embedding_bias_weights"),
    # Not used: with it, a request of max_tokens alone reaches us, and we can say what it lacks.
    Joint(REQUEST_OUTPUT_LEN, "max_tokens"),
    Joint(STOP, "stop"),
    # llama-index sends these three, of these types, with its stop request and nowhere else.
    Joint(STOP_INPUT_IDS, "input_ids"),
    Joint(STOP_INPUT_LENGTHS, "input_lengths"),
    Joint(STOP_REQUEST_OUTPUT_LEN, "request_output_len"),
)

INPUT_ID = Declared("INPUT_ID", Dtype.INT32, (-1,))
REQUEST_INPUT_LEN = Declared("REQUEST_INPUT_LEN", Dtype.INT32, (1,))
BAD_WORDS_IDS = Declared("BAD_WORDS_IDS", Dtype.INT32, (2, -1))
EMBEDDING_BIAS = Declared("EMBEDDING_BIAS", Dtype.FP32, (-1,))

PREPROCESSING_OUTPUTS: tuple[Joint, ...] = (
    Joint(INPUT_ID, "_INPUT_ID"),
    Joint(REQUEST_INPUT_LEN, "_REQUEST_INPUT_LEN"),
    Joint(BAD_WORDS_IDS, "_BAD_WORDS_IDS"),
    Joint(EMBEDDING_BIAS, "_EMBEDDING_BIAS"),
)

TOKENS_BATCH = Declared("TOKENS_BATCH", Dtype.INT32, (-1, -1))
SEQUENCE_LENGTH = Declared("SEQUENCE_LENGTH", Dtype.INT32, (-1,))
PREFIX_TOKENS = Declared("PREFIX_TOKENS", Dtype.INT32, (-1,))
TEXT_LENGTH = Declared("TEXT_LENGTH", Dtype.INT32, (1,))

POSTPROCESSING_INPUTS: tuple[Joint, ...] = (
    Joint(TOKENS_BATCH, "_TOKENS_BATCH"),
    Joint(SEQUENCE_LENGTH, "_SEQUENCE_LENGTH"),
    Joint(PREFIX_TOKENS, "_PREFIX_TOKENS"),
    Joint(TEXT_LENGTH, "_TEXT_LENGTH"),
)

OUTPUT = Declared("OUTPUT", Dtype.STRING, (1,))

POSTPROCESSING_OUTPUTS: tuple[Joint, ...] = (Joint(OUTPUT, TEXT_OUTPUT.name),)

_FOR_THE_ENGINE_TOO = {"max_tokens", "stop"}
_IDS_OF_THE_ENSEMBLE = {
    "input_ids": "_INPUT_ID",
    "input_lengths": "_REQUEST_INPUT_LEN",
    "bad_words_list": "_BAD_WORDS_IDS",
    "embedding_bias": "_EMBEDDING_BIAS",
}
_TO_POSTPROCESSING = {
    "output_ids": "_TOKENS_BATCH",
    "sequence_length": "_SEQUENCE_LENGTH",
    "prefix_token_ids": "_PREFIX_TOKENS",
    "text_length": "_TEXT_LENGTH",
}


def _public_inputs() -> tuple[Declared, ...]:
    declared = [Declared(name, e.dtype, e.dims) for e in INPUTS for name in e.text_names]
    known = {tensor.name for tensor in declared}
    for tensor, ensemble_name in PREPROCESSING_INPUTS:
        if ensemble_name not in known:
            declared.append(Declared(ensemble_name, tensor.dtype, tensor.dims))
    return tuple(declared)


def _public_outputs() -> tuple[Declared, ...]:
    return tuple(Declared(o.name, o.dtype, o.dims) for o in OUTPUTS if o.on_ensemble)


def inputs_of(model: Model) -> tuple[Declared, ...]:
    """All inputs that ``model`` declares; every one is optional."""
    if model is Model.PREPROCESSING:
        return tuple(joint.tensor for joint in PREPROCESSING_INPUTS)
    if model is Model.POSTPROCESSING:
        return tuple(joint.tensor for joint in POSTPROCESSING_INPUTS)
    if model is Model.INFLIGHT_LLM:
        return tuple(Declared(name, e.dtype, e.dims) for e in INPUTS for name in e.tensor_names)
    return _public_inputs()


def outputs_of(model: Model) -> tuple[Declared, ...]:
    """All outputs that ``model`` declares; text_output is the first where there is one."""
    if model is Model.PREPROCESSING:
        return tuple(joint.tensor for joint in PREPROCESSING_OUTPUTS)
    if model is Model.POSTPROCESSING:
        return tuple(joint.tensor for joint in POSTPROCESSING_OUTPUTS)
    if model is Model.INFLIGHT_LLM:
        return tuple(Declared(o.name, o.dtype, o.dims) for o in OUTPUTS)
    return _public_outputs()


class Step(NamedTuple):
    """One step of the ensemble: (tensor of the model, tensor of the ensemble) pairs."""

    model: Model
    input_map: tuple[tuple[str, str], ...]
    output_map: tuple[tuple[str, str], ...]


def ensemble_steps() -> tuple[Step, ...]:
    """preprocessing -> inflight_llm -> postprocessing, with every name of the ensemble in use."""
    words = {joint.ensemble_name for joint in PREPROCESSING_INPUTS} - _FOR_THE_ENGINE_TOO
    straight = [tensor.name for tensor in _public_inputs() if tensor.name not in words]
    return (
        Step(
            Model.PREPROCESSING,
            tuple((tensor.name, name) for tensor, name in PREPROCESSING_INPUTS),
            tuple((tensor.name, name) for tensor, name in PREPROCESSING_OUTPUTS),
        ),
        Step(
            Model.INFLIGHT_LLM,
            (*_IDS_OF_THE_ENSEMBLE.items(), *((name, name) for name in straight)),
            (
                *_TO_POSTPROCESSING.items(),
                *((o.name, o.name) for o in OUTPUTS if o.on_ensemble and o is not TEXT_OUTPUT),
            ),
        ),
        Step(
            Model.POSTPROCESSING,
            tuple((tensor.name, name) for tensor, name in POSTPROCESSING_INPUTS),
            tuple((tensor.name, name) for tensor, name in POSTPROCESSING_OUTPUTS),
        ),
    )
