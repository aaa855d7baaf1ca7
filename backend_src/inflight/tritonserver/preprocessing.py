"""The ensemble's first step: a chat or text to token ids, words to token ids. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.api.config import InflightConfig
from inflight.errors import UnsupportedRequestError
from inflight.text.tokenizer import Tokenizer
from inflight.tritonserver.contract import field_of_tensor
from inflight.tritonserver.contract.models import (
    BAD_WORDS_IDS,
    EMBEDDING_BIAS,
    INPUT_ID,
    PREPROCESSING_INPUTS,
    REQUEST_INPUT_LEN,
    STOP,
    Declared,
)
from inflight.tritonserver.prompts import prompt_ids
from inflight.tritonserver.startup import load_tokenizer
from inflight.tritonserver.steps import answer_each
from inflight.tritonserver.tensors import batch_size, rows
from inflight.tritonserver.words import bad_word_sequences, flatten, logit_bias

_PUBLIC_NAME = {joint.tensor.name: joint.ensemble_name for joint in PREPROCESSING_INPUTS}
_ONLY_WITH_STOP = {"input_ids", "input_lengths", "request_output_len"}


class Preprocessing:
    """Stateless between requests; one for each model instance."""

    def __init__(self, config: InflightConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer

    @classmethod
    def start(cls, parameters: Mapping[str, str]) -> Preprocessing:
        """Raises ConfigError or CheckpointError that say what is wrong."""
        return cls(*load_tokenizer(parameters))

    def execute(self, pb_requests: Sequence[Any]) -> list[Any]:
        """One ``InferenceResponse`` for each request, in their order. Never raises."""
        return answer_each(pb_requests, self._outputs)

    def _outputs(self, pb_request: Any) -> list[tuple[Declared, NDArray[Any]]]:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in pb_request.inputs()}
        size = next((batch_size(name, array) for name, array in tensors.items()), 1)
        if np.any(tensors.get(STOP.name, False)):
            return self._joined([()] * size, [()] * size, [{}] * size)
        elements = self._fields(tensors, size)
        return self._joined(
            [self._prompt(element) for element in elements],
            [bad_word_sequences(element, self._tokenizer) for element in elements],
            [logit_bias(element, self._tokenizer) for element in elements],
        )

    def _fields(self, tensors: Mapping[str, NDArray[Any]], size: int) -> list[dict[str, Any]]:
        """The public fields behind the tensors, for each batch element."""
        elements: list[dict[str, Any]] = [{} for _ in range(size)]
        for name, array in tensors.items():
            public = _PUBLIC_NAME[name]
            if public in _ONLY_WITH_STOP:
                raise UnsupportedRequestError(
                    public, "the ensemble takes text_input or messages: send ids to inflight_llm"
                )
            entry = field_of_tensor(public)
            assert entry is not None, f"{public} is no field of the contract"
            for element, value in zip(elements, rows(entry, public, array, size), strict=True):
                element[entry.field] = value
        return elements

    def _prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        return prompt_ids(fields, self._tokenizer, self._config.max_input_chars)

    def _joined(
        self,
        prompts: Sequence[Sequence[int]],
        bad_words: Sequence[Sequence[Sequence[int]]],
        logit_biases: Sequence[Mapping[int, float]],
    ) -> list[tuple[Declared, NDArray[Any]]]:
        """The batch's outputs; rows are padded on the right to the longest."""
        lengths = np.array([[len(ids)] for ids in prompts], dtype=np.int32)
        ids = [np.array(ids, dtype=np.int32) for ids in prompts]
        words = [flatten(sequences) for sequences in bad_words]
        word_ids = _right_padded([flat[0] for flat in words], 0)
        word_ends = _right_padded([flat[1] for flat in words], -1)
        return [
            (INPUT_ID, _right_padded(ids, 0)),
            (REQUEST_INPUT_LEN, lengths),
            (BAD_WORDS_IDS, np.stack([word_ids, word_ends], axis=1)),
            (EMBEDDING_BIAS, self._dense(logit_biases)),
        ]

    def _dense(self, logit_biases: Sequence[Mapping[int, float]]) -> NDArray[np.float32]:
        """[batch, vocabulary size], or [batch, 0] where nobody has a bias.

        A sum of weights too large for FP32 becomes its largest number: the engine clips it.
        """
        largest = float(np.finfo(np.float32).max)
        width = self._tokenizer.vocab_size if any(logit_biases) else 0
        dense = np.zeros((len(logit_biases), width), dtype=np.float32)
        for row, biases in zip(dense, logit_biases, strict=True):
            for token_id, bias in biases.items():
                row[token_id] = max(-largest, min(bias, largest)) if math.isfinite(bias) else bias
        return dense


def _right_padded(rows: Sequence[NDArray[np.int32]], padding: int) -> NDArray[np.int32]:
    """The rows below each other, filled up to the longest: [batch, longest]."""
    padded = np.full((len(rows), max(map(len, rows))), padding, dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
