"""Sampler: one token, and its log-prob where asked for, for each sampling row of an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.api.request import SamplingConfig
from inflight.batch.llm_request import LlmRequest
from inflight.errors import ForwardError
from inflight.sampling.candidates import largest, nucleus
from inflight.sampling.draw import CounterGenerator
from inflight.sampling.edits import LARGEST_LOGIT, LogitEdits

_SEQUENCE_INDEX = 0
"""Each request has one sequence as long as num_return_sequences is 1."""

_RUN = 256
"""``pick`` sums weights in runs of this length before it looks inside one."""

_LEAST_TEMPERATURE = 1e-30
"""Cold enough to tell any two logits apart; anything much colder is 0 in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    token_ids: npt.NDArray[np.int32]
    """int32[R]."""
    log_probs: npt.NDArray[np.float32]
    """float32[R], natural logarithms; 0 for the rows whose request wants none."""


@dataclass(frozen=True, slots=True, eq=False)
class _Treatment:
    """What a row needs beyond the plain argmax."""

    config: SamplingConfig
    is_greedy: bool
    wants_log_prob: bool
    edits: LogitEdits | None


class Sampler:
    """Chooses tokens. Used by one thread.

    For each row: guard, bias, penalties, masks (``LogitEdits``); then the argmax if the request is
    greedy, else temperature, min_p, top_k, top_p (TensorRT-LLM's order) and the inverse of the
    cumulative distribution over the surviving ids, ascending, at one uniform number
    (``CounterGenerator``). top_p looks at probabilities renormalised over what min_p and top_k
    left. Equal logits rank by id, the lower one first.

    A log-prob is that of the chosen token over the whole vocabulary, after bias, penalties and
    masks and before temperature. With ``normalize_log_probs`` it is that over the survivors after
    temperature, TensorRT-LLM's meaning; a greedy row has one survivor, so 0.
    """

    def __init__(self, *, vocab_size: int, normalize_log_probs: bool) -> None:
        self._vocab_size = vocab_size
        self._normalize_log_probs = normalize_log_probs
        self._generator = CounterGenerator()
        self._scratch = np.empty(vocab_size, dtype=np.float32)
        self._treatments: dict[int, _Treatment | None] = {}

    def add(self, request: LlmRequest) -> None:
        """Takes a request up, once, before its first row. A pause needs no call: state stays right.

        ``enqueue_request`` has checked the ids of ``bad_words`` and ``logit_bias``.
        """
        assert request.request_id not in self._treatments
        ask = request.request
        acted_on = (*ask.logit_bias, *(word[-1] for word in ask.bad_words))
        assert all(0 <= token_id < self._vocab_size for token_id in acted_on)
        config = ask.sampling_config
        edits = LogitEdits(request, self._vocab_size) if LogitEdits.needed_by(request) else None
        wants_log_prob = ask.output_config.return_log_probs
        plain = config.is_greedy and edits is None and not wants_log_prob
        self._treatments[request.request_id] = (
            None if plain else _Treatment(config, config.is_greedy, wants_log_prob, edits)
        )

    def remove(self, request_id: int) -> None:
        """Forgets a request; one that was never added is ignored."""
        self._treatments.pop(request_id, None)

    def sample(
        self, requests: Sequence[LlmRequest], logits: npt.NDArray[np.float32]
    ) -> SampledTokens:
        """The next token of each request, at position ``request.num_tokens``.

        ``logits``: float32[R, vocab_size], C-contiguous, row i of ``requests[i]``; may be written
        into. NaN cannot be chosen, and +inf counts as LARGEST_LOGIT. ForwardError if a row has no
        other number than NaN and -inf (or none above -LARGEST_LOGIT). Changes no request.
        """
        assert logits.shape == (len(requests), self._vocab_size)
        token_ids = logits.argmax(axis=1).astype(np.int32)
        _guard(logits, token_ids)
        log_probs = np.zeros(len(requests), dtype=np.float32)
        with np.errstate(over="ignore"):  # far below the peak -inf is right: probability 0
            for index, request in enumerate(requests):
                treatment = self._treatments[request.request_id]
                if treatment is not None:
                    token_ids[index], log_probs[index] = self._treat(
                        treatment, request, logits[index], int(token_ids[index])
                    )
        return SampledTokens(token_ids, log_probs)

    def _treat(
        self,
        treatment: _Treatment,
        request: LlmRequest,
        row: npt.NDArray[np.float32],
        likeliest: int,
    ) -> tuple[int, float]:
        """Token and log-prob of one row; ``likeliest`` is its argmax before edits."""
        if treatment.edits is not None:
            treatment.edits.apply(row, request)
            likeliest = int(row.argmax())
        peak = row[likeliest]
        token_id = likeliest
        survivor_weight = survivor_sum = 1.0  # greedy: one survivor
        if not treatment.is_greedy:
            ids, weights = self._distribution(row, peak, treatment.config)
            uniform = self._generator.uniform(request.seed, _SEQUENCE_INDEX, request.num_tokens)
            place = pick(weights, uniform)
            token_id = place if ids is None else int(ids[place])
            if treatment.wants_log_prob:
                survivor_weight, survivor_sum = float(weights[place]), float(weights.sum())
        if not treatment.wants_log_prob:
            return token_id, 0.0
        if self._normalize_log_probs:
            return token_id, math.log(survivor_weight / survivor_sum)
        total = float(self._exp_into_scratch(row, peak, 1.0).sum())
        return token_id, float(row[token_id] - peak) - math.log(total)

    def _distribution(
        self, row: npt.NDArray[np.float32], peak: np.float32, config: SamplingConfig
    ) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float32]]:
        """Surviving ids, int64[n] ascending (None: all), and weights in proportion to probability.

        The weights, float32[n], may lie in the scratch row. top_k and min_p look at raw logits,
        which temperature keeps in order; the largest logit passes both, so their order is free.
        """
        temperature = 1.0 if config.temperature is None else config.temperature
        temperature = max(temperature, _LEAST_TEMPERATURE)
        ids: npt.NDArray[np.int64] | None = None
        if config.top_k and config.top_k < len(row):
            ids = largest(row, config.top_k)
        if config.min_p:
            # p >= min_p * p_max, in logits; float32, lest the comparison widens the whole row
            least = np.float32(float(peak) + temperature * math.log(config.min_p))
            ids = np.flatnonzero(row >= least) if ids is None else ids[row[ids] >= least]
        weights = self._exp_into_scratch(row if ids is None else row[ids], peak, temperature)
        if config.top_p and config.top_p < 1:
            kept = nucleus(weights, config.top_p)
            ids = kept if ids is None else ids[kept]
            weights = weights[kept]
        return ids, weights

    def _exp_into_scratch(
        self, logits: npt.NDArray[np.float32], peak: np.float32, temperature: float
    ) -> npt.NDArray[np.float32]:
        """exp((logits - peak) / temperature), float32[n], valid until the next call.

        Fresh arrays as large as a vocabulary cost more than the arithmetic on them.
        """
        scratch = self._scratch[: len(logits)]
        np.subtract(logits, peak, out=scratch)
        if temperature != 1.0:
            scratch /= temperature
        np.exp(scratch, out=scratch)
        return scratch


def _guard(logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int32]) -> None:
    """Brings every row's maximum into +-LARGEST_LOGIT, correcting its argmax in ``token_ids``.

    numpy's argmax stops at NaN and finds +inf, so the maxima show every bad row without another
    pass over the logits.
    """
    maxima = logits[np.arange(len(logits)), token_ids]
    for index in np.flatnonzero(~(np.abs(maxima) <= LARGEST_LOGIT)):
        row = logits[index]
        row[np.isnan(row)] = -np.inf
        np.minimum(row, LARGEST_LOGIT, out=row)
        token_ids[index] = row.argmax()
        if row[token_ids[index]] < -LARGEST_LOGIT:
            raise ForwardError("the model's logits hold no usable number")


def pick(weights: npt.NDArray[np.float32], uniform: float) -> int:
    """First index whose cumulative weight exceeds ``uniform`` times the sum of all weights.

    ``weights``: float32[n], >= 0, not all 0; ``uniform`` in [0, 1). Never an index of weight 0.
    """
    runs = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _RUN)), dtype=np.float64)
    # uniform * sum may round up to the sum itself; every run must stay reachable, none beyond.
    target = min(uniform * runs[-1], np.nextafter(runs[-1], 0))
    run = int(np.searchsorted(runs, target, side="right"))
    before = runs[run - 1] if run else 0.0
    inside = weights[run * _RUN : (run + 1) * _RUN]
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, side="right"))
    if place == len(inside):  # the two sums of a run differ in their last bits
        place = int(np.flatnonzero(inside)[-1])
    return run * _RUN + place
