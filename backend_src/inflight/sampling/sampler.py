"""Sampler: one token, and its log-prob where asked for, for each sampling row of an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.api.request import SamplingConfig
from inflight.batch.device_sampling import (
    LARGEST_LOGIT,
    SampledRows,
    SamplingInputs,
    SamplingRoom,
)
from inflight.batch.llm_request import LlmRequest
from inflight.errors import ForwardError
from inflight.sampling.draw import SEQUENCE_INDEX, CounterGenerator
from inflight.sampling.edits import LogitEdits
from inflight.sampling.kernels import Floats, NumpySampling, SamplingKernels
from inflight.sampling.on_device import LEAST_TEMPERATURE, DeviceSampling


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


class SamplingRows(NamedTuple):
    """The sampling rows of one iteration, with all that the sampler knows of them."""

    requests: Sequence[LlmRequest]
    treatments: Sequence[_Treatment | None]
    """None: the plain argmax."""
    inputs: SamplingInputs | None = None
    """The same for a device that samples; None: it does not, or the largest logits say all."""

    @property
    def need_logits(self) -> bool:
        """False when the largest logit of each row says all."""
        return any(treatment is not None for treatment in self.treatments)


class Sampler:
    """Chooses tokens. ``sample`` may run beside the other methods, which belong to one thread.

    For each row: guard, bias, penalties, masks (``LogitEdits``); then the argmax if the request is
    greedy, else temperature, min_p, top_k, top_p (TensorRT-LLM's order) and the inverse of the
    cumulative distribution over the surviving ids, ascending, at one uniform number
    (``CounterGenerator``). top_p looks at probabilities renormalised over what min_p and top_k
    left. Equal logits rank by id, the lower one first.

    A log-prob is that of the chosen token over the whole vocabulary, after bias, penalties and
    masks and before temperature. With ``normalize_log_probs`` it is that over the survivors after
    temperature, TensorRT-LLM's meaning; a greedy row has one survivor, so 0.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        normalize_log_probs: bool,
        kernels: SamplingKernels | None = None,
        device_room: SamplingRoom | None = None,
    ) -> None:
        """``kernels``: None: numpy's. ``device_room``: of a device that samples; None: the host
        does."""
        self._vocab_size = vocab_size
        self._normalize_log_probs = normalize_log_probs
        self._generator = CounterGenerator()
        self._kernels = kernels or NumpySampling(vocab_size)
        self._treatments: dict[int, _Treatment | None] = {}
        self._device: DeviceSampling | None = None
        if device_room is not None:
            self._device = DeviceSampling(
                device_room, vocab_size=vocab_size, normalize_log_probs=normalize_log_probs
            )

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
        if self._device is not None:
            self._device.remove(request_id)

    def rows(self, requests: Sequence[LlmRequest]) -> SamplingRows:
        """``requests`` as they are now, each of which was added: what happens to one afterwards,
        also ``remove``, does not disturb ``sample`` and ``complete``."""
        rows = SamplingRows(requests, [self._treatments[r.request_id] for r in requests])
        if self._device is None or not rows.need_logits:
            return rows
        edits = [None if t is None else t.edits for t in rows.treatments]
        return rows._replace(inputs=self._device.inputs(requests, edits))

    def sample(self, rows: SamplingRows, logits: npt.NDArray[np.float32]) -> SampledTokens:
        """The next token of each request, at position ``request.num_tokens``.

        ``logits``: float32[R, vocab_size], C-contiguous, row i of ``rows``; may be written into.
        NaN cannot be chosen, and +inf counts as LARGEST_LOGIT. ForwardError if a row has no other
        number than NaN and -inf (or none above -LARGEST_LOGIT). Changes no request.
        """
        assert logits.shape == (len(rows.requests), self._vocab_size)
        token_ids = logits.argmax(axis=1).astype(np.int32)
        _guard(logits, token_ids)
        log_probs = np.zeros(len(logits), dtype=np.float32)
        with np.errstate(over="ignore"):  # far below the peak -inf is right: probability 0
            for index, request in enumerate(rows.requests):
                treatment = rows.treatments[index]
                if treatment is not None:
                    token_ids[index], log_probs[index] = self._treat(
                        treatment, request, logits[index], int(token_ids[index])
                    )
        return SampledTokens(token_ids, log_probs)

    def complete(
        self, rows: SamplingRows, sampled: SampledRows, logits: npt.NDArray[np.float32]
    ) -> SampledTokens:
        """What the device has sampled, and the rows that it has left, sampled here: ``logits``
        float32[L, vocab_size] are theirs, raw. Otherwise as ``sample``."""
        token_ids, log_probs = sampled.token_ids, sampled.log_probs
        if len(sampled.left):
            token_ids, log_probs = token_ids.copy(), log_probs.copy()
            left = sampled.left.tolist()
            own = SamplingRows([rows.requests[i] for i in left], [rows.treatments[i] for i in left])
            here = self.sample(own, logits)
            token_ids[sampled.left], log_probs[sampled.left] = here.token_ids, here.log_probs
        return SampledTokens(token_ids, log_probs)

    def take_likeliest(self, rows: SamplingRows, token_ids: npt.NDArray[np.int32]) -> SampledTokens:
        """As ``sample``, for rows that need no logits: int32[R], the id of each largest one."""
        assert not rows.need_logits and len(token_ids) == len(rows.requests)
        return SampledTokens(token_ids, np.zeros(len(token_ids), dtype=np.float32))

    def _treat(
        self, treatment: _Treatment, request: LlmRequest, row: Floats, likeliest: int
    ) -> tuple[int, float]:
        """Token and log-prob of one row; ``likeliest`` is its argmax before edits."""
        if treatment.edits is not None:
            treatment.edits.apply(row, request)
            likeliest = int(row.argmax())
        peak = float(row[likeliest])
        token_id = likeliest
        survivor_weight = survivor_sum = 1.0  # greedy: one survivor
        if not treatment.is_greedy:
            ids, weights = self._survivors(row, peak, treatment.config)
            uniform = self._generator.uniform(request.seed, SEQUENCE_INDEX, request.num_tokens)
            place = self._kernels.pick(weights, uniform)
            token_id = place if ids is None else int(ids[place])
            if treatment.wants_log_prob:
                survivor_weight, survivor_sum = float(weights[place]), float(weights.sum())
        if not treatment.wants_log_prob:
            return token_id, 0.0
        if self._normalize_log_probs:
            return token_id, math.log(survivor_weight / survivor_sum)
        _, weights = self._kernels.survivors(row, peak)
        return token_id, float(row[token_id]) - peak - math.log(float(weights.sum()))

    def _survivors(
        self, row: Floats, peak: float, config: SamplingConfig
    ) -> tuple[npt.NDArray[np.int64] | None, Floats]:
        temperature = 1.0 if config.temperature is None else config.temperature
        temperature = max(temperature, LEAST_TEMPERATURE)
        # p >= min_p * p_max, in logits
        least = peak + temperature * math.log(config.min_p) if config.min_p else None
        return self._kernels.survivors(
            row,
            peak,
            temperature=temperature,
            top_k=config.top_k or None,
            top_p=config.top_p or None,
            min_p_logit=least,
        )


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
