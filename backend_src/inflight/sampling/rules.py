"""RequestRules: how each request is sampled, as numbers in one array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.batch.llm_request import LlmRequest
from inflight.sampling.draw import SEQUENCE_INDEX, CounterGenerator, Draws, Words

LEAST_TEMPERATURE = 1e-30
"""Cold enough to tell any two logits apart; anything much colder is 0 in float32."""

RULES = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p_offset", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("wants_log_prob", np.int32),
        ("seed", np.uint64),
        ("uniform", np.float64),  # of a row in an iteration; 0 where nothing is drawn
    ],
    align=True,  # as the native kernels read it
)
"""The names and their neutral values are those of SamplingInputs."""

Uniforms = Callable[[Words, int, Words], Draws]

_FIRST_ROOM = 64
_PLAIN = 0
"""The place of all requests that take the plain arg-max: its rules are neutral."""


class RequestRules:
    """The rules of requests, each at its place in an array that is written when a request comes;
    an iteration picks its rows out of it. Used by one thread."""

    def __init__(self, vocab_size: int, uniforms: Uniforms | None = None) -> None:
        """``uniforms``: of ``SamplingKernels``; None: CounterGenerator's, which are the same."""
        self._vocab_size = vocab_size
        self._kept = np.zeros(_FIRST_ROOM, dtype=RULES)
        self._kept[_PLAIN] = (0.0, vocab_size, 1.0, -math.inf, 1.0, 0.0, 0.0, 0, 0, 0.0)
        self._free = list(range(1, _FIRST_ROOM))
        self._places: dict[int, int] = {}
        """By request id."""
        self._uniforms = uniforms or CounterGenerator().uniforms

    def add(self, request: LlmRequest, *, is_plain: bool) -> None:
        """``is_plain``: nothing but the largest logit matters to the request."""
        assert request.request_id not in self._places
        if is_plain:
            self._places[request.request_id] = _PLAIN
            return
        if not self._free:
            room = len(self._kept)
            self._kept = np.concatenate((self._kept, np.zeros(room, dtype=RULES)))
            self._free.extend(range(room, 2 * room))
        place = self._places[request.request_id] = self._free.pop()
        self._kept[place] = _rules_of(request, self._vocab_size)

    def remove(self, request_id: int) -> None:
        """Forgets a request; one that was never added is ignored."""
        place = self._places.pop(request_id, _PLAIN)
        if place != _PLAIN:
            self._free.append(place)

    def rows(self, requests: Sequence[LlmRequest]) -> npt.NDArray[Any] | None:
        """RULES[R] of requests that were added, with the draws of their next positions; a copy.
        None: all of them are plain."""
        places = [self._places[request.request_id] for request in requests]
        if not any(places):
            return None
        rules = self._kept[places]
        drawn = np.flatnonzero(rules["temperature"])
        positions = np.array([requests[i].num_tokens for i in drawn], dtype=np.uint64)
        rules["uniform"][drawn] = self._uniforms(rules["seed"][drawn], SEQUENCE_INDEX, positions)
        return rules


def _rules_of(request: LlmRequest, vocab_size: int) -> tuple[float, ...]:
    """In the order of ``RULES``."""
    config = request.request.sampling_config
    temperature = 1.0 if config.temperature is None else config.temperature
    temperature = max(temperature, LEAST_TEMPERATURE)
    return (
        0.0 if config.is_greedy else temperature,
        min(config.top_k or vocab_size, vocab_size),
        config.top_p or 1.0,
        # p >= min_p * p_max, in logits
        temperature * math.log(config.min_p) if config.min_p else -math.inf,
        config.repetition_penalty,
        config.presence_penalty,
        config.frequency_penalty,
        int(request.request.output_config.return_log_probs),
        request.seed,
        0.0,
    )
