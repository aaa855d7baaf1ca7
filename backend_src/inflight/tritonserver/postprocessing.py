"""The ensemble's last step: a delta's ids to its text, as a pure function. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inflight.errors import InvalidRequestError
from inflight.text.stream import detokenize
from inflight.text.tokenizer import Tokenizer
from inflight.tritonserver.contract.models import (
    OUTPUT,
    PREFIX_TOKENS,
    SEQUENCE_LENGTH,
    TEXT_LENGTH,
    TOKENS_BATCH,
    Declared,
)
from inflight.tritonserver.startup import load_tokenizer
from inflight.tritonserver.steps import answer_each


class Postprocessing:
    """Stateless: the engine has already held back, cut and chosen what may be sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def start(cls, parameters: Mapping[str, str]) -> Postprocessing:
        """Raises ConfigError or CheckpointError that say what is wrong."""
        _, tokenizer = load_tokenizer(parameters)
        return cls(tokenizer)

    def execute(self, pb_requests: Sequence[Any]) -> list[Any]:
        """One ``InferenceResponse`` for each request, in their order. Never raises."""
        return answer_each(pb_requests, self._outputs)

    def _outputs(self, pb_request: Any) -> list[tuple[Declared, NDArray[Any]]]:
        """OUTPUT, one string for each batch element, as 1-D [batch]."""
        tokens = _tensor(pb_request, TOKENS_BATCH)
        lengths = _tensor(pb_request, SEQUENCE_LENGTH)
        prefixes = _tensor(pb_request, PREFIX_TOKENS)
        text_lengths = _tensor(pb_request, TEXT_LENGTH)
        texts = [
            detokenize(
                self._tokenizer,
                prefix.tolist(),
                beams[0, : length[0]].tolist(),
                int(text_length[0]),
            ).encode("utf-8")
            for beams, length, prefix, text_length in zip(
                tokens, lengths, prefixes, text_lengths, strict=True
            )
        ]
        return [(OUTPUT, np.array(texts, dtype=np.object_))]


def _tensor(pb_request: Any, declared: Declared) -> NDArray[Any]:
    """[batch, *dims] of ``declared``; ids and lengths, so no value is negative."""
    tensor = pb_utils.get_input_tensor_by_name(pb_request, declared.name)
    if tensor is None:
        raise InvalidRequestError(declared.name, "", "is missing")
    array: NDArray[Any] = tensor.as_numpy()
    if array.ndim != 1 + len(declared.dims):
        raise InvalidRequestError(
            declared.name, list(array.shape), f"must have {1 + len(declared.dims)} axes"
        )
    if array.size and array.min() < 0:
        raise InvalidRequestError(declared.name, int(array.min()), "must be 0 or larger")
    return array
