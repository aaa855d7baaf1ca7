"""Sampler: one token, and its log-prob where asked for, for each sampling row of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.batch.device_sampling import (
    LARGEST_LOGIT,
    SampledRows,
    SamplingInputs,
    SamplingRoom,
)
from inflight.batch.llm_request import LlmRequest
from inflight.errors import ForwardError
from inflight.sampling.edits import EditedRow, LogitEdits, edit_rows
from inflight.sampling.kernels import NumpySampling, SamplingKernels
from inflight.sampling.on_device import DeviceSampling
from inflight.sampling.rules import RequestRules


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    token_ids: npt.NDArray[np.int32]
    """int32[R]."""
    log_probs: npt.NDArray[np.float32]
    """float32[R], natural logarithms; 0 for the rows whose request wants none."""


class SamplingRows(NamedTuple):
    """The sampling rows of one iteration, with all that the sampler knows of them."""

    requests: Sequence[LlmRequest]
    rules: npt.NDArray[Any] | None
    """RULES[R]; None: each row takes the plain arg-max."""
    edits: Sequence[LogitEdits | None]
    inputs: SamplingInputs | None = None
    """The same for a device that samples; None: it does not, or the largest logits say all."""

    @property
    def need_logits(self) -> bool:
        """False when the largest logit of each row says all."""
        return self.rules is not None

    def edited(self) -> list[EditedRow]:
        """Those of the rows that have edits."""
        each = enumerate(zip(self.requests, self.edits, strict=True))
        return [EditedRow(row, request, edits) for row, (request, edits) in each if edits]


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
        self._kernels = kernels or NumpySampling(vocab_size)
        self._rules = RequestRules(vocab_size, self._kernels.uniforms)
        self._edits: dict[int, LogitEdits] = {}
        self._device: DeviceSampling | None = None
        if device_room is not None:
            self._device = DeviceSampling(device_room, normalize_log_probs=normalize_log_probs)

    def add(self, request: LlmRequest) -> None:
        """Takes a request up, once, before its first row. A pause needs no call: state stays right.

        ``enqueue_request`` has checked the ids of ``bad_words`` and ``logit_bias``.
        """
        ask = request.request
        acted_on = (*ask.logit_bias, *(word[-1] for word in ask.bad_words))
        assert all(0 <= token_id < self._vocab_size for token_id in acted_on)
        is_edited = LogitEdits.needed_by(request)
        is_drawn = not ask.sampling_config.is_greedy
        is_plain = not (is_edited or is_drawn or ask.output_config.return_log_probs)
        self._rules.add(request, is_plain=is_plain)
        if is_edited:
            self._edits[request.request_id] = LogitEdits(request, self._vocab_size)

    def remove(self, request_id: int) -> None:
        """Forgets a request; one that was never added is ignored."""
        self._rules.remove(request_id)
        self._edits.pop(request_id, None)
        if self._device is not None:
            self._device.remove(request_id)

    def rows(self, requests: Sequence[LlmRequest]) -> SamplingRows:
        """``requests`` as they are now, each of which was added: what happens to one afterwards,
        also ``remove``, does not disturb ``sample`` and ``complete``."""
        rules = self._rules.rows(requests)
        edits = [self._edits.get(request.request_id) for request in requests]
        if rules is None or self._device is None:
            return SamplingRows(requests, rules, edits)
        return SamplingRows(requests, rules, edits, self._device.inputs(requests, rules, edits))

    def sample(self, rows: SamplingRows, logits: npt.NDArray[np.float32]) -> SampledTokens:
        """The next token of each request, at the position that it had when ``rows`` was made.

        ``logits``: float32[R, vocab_size], C-contiguous, row i of ``rows``; may be written into.
        NaN cannot be chosen, and +inf counts as LARGEST_LOGIT. ForwardError if a row has no other
        number than NaN and -inf (or none above -LARGEST_LOGIT). Changes no request.
        """
        assert logits.shape == (len(rows.requests), self._vocab_size)
        if rows.rules is None:
            token_ids = self._kernels.likeliest(logits, np.arange(len(logits)))
            if len(bad := _out_of_range(logits[np.arange(len(logits)), token_ids])):
                _bring_into_range(logits, bad)
                token_ids[bad] = self._kernels.likeliest(logits, bad)
            return SampledTokens(token_ids, np.zeros(len(logits), dtype=np.float32))
        if edited := rows.edited():
            self._edit(logits, edited)
        token_ids, log_probs, maxima = self._sample_rows(logits, rows.rules)
        if len(bad := _out_of_range(maxima)):
            # What edits have moved out of the range is finite, and meant.
            bad = np.setdiff1d(bad, [each.row for each in edited])
            _bring_into_range(logits, bad)
            token_ids[bad], log_probs[bad], _ = self._sample_rows(logits[bad], rows.rules[bad])
        return SampledTokens(token_ids, log_probs)

    def _sample_rows(
        self, logits: npt.NDArray[np.float32], rules: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        return self._kernels.sample_rows(
            logits, rules, normalize_log_probs=self._normalize_log_probs
        )

    def _edit(self, logits: npt.NDArray[np.float32], edited: list[EditedRow]) -> None:
        """Edits count on raw maxima within the range."""
        which = np.array([each.row for each in edited])
        maxima = logits[which, self._kernels.likeliest(logits, which)]
        _bring_into_range(logits, which[_out_of_range(maxima)])
        edit_rows(logits, edited)

    def complete(
        self, rows: SamplingRows, sampled: SampledRows, logits: npt.NDArray[np.float32]
    ) -> SampledTokens:
        """What the device has sampled, and the rows that it has left, sampled here: ``logits``
        float32[L, vocab_size] are theirs, raw. Otherwise as ``sample``."""
        token_ids, log_probs = sampled.token_ids, sampled.log_probs
        if len(sampled.left):
            token_ids, log_probs = token_ids.copy(), log_probs.copy()
            assert rows.rules is not None
            left = sampled.left.tolist()
            own = SamplingRows(
                [rows.requests[i] for i in left],
                rows.rules[left],
                [rows.edits[i] for i in left],
            )
            here = self.sample(own, logits)
            token_ids[sampled.left], log_probs[sampled.left] = here.token_ids, here.log_probs
        return SampledTokens(token_ids, log_probs)

    def take_likeliest(self, rows: SamplingRows, token_ids: npt.NDArray[np.int32]) -> SampledTokens:
        """As ``sample``, for rows that need no logits: int32[R], the id of each largest one."""
        assert not rows.need_logits and len(token_ids) == len(rows.requests)
        return SampledTokens(token_ids, np.zeros(len(token_ids), dtype=np.float32))


def _out_of_range(maxima: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Where the largest logits are not within +-LARGEST_LOGIT. numpy's argmax stops at NaN and
    finds +inf, so they show every bad row without another pass over the logits."""
    return np.flatnonzero(~(np.abs(maxima) <= LARGEST_LOGIT))


def _bring_into_range(logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]) -> None:
    """Raises ForwardError where there is no usable number."""
    for index in rows.tolist():
        row = logits[index]
        row[np.isnan(row)] = -np.inf
        np.minimum(row, LARGEST_LOGIT, out=row)
        if row.max() < -LARGEST_LOGIT:
            raise ForwardError("the model's logits hold no usable number")
