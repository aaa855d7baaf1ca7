"""What a request changes in its logits before a token is chosen: bias, penalties, masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.batch.device_sampling import LARGEST_LOGIT
from inflight.batch.llm_request import LlmRequest
from inflight.sampling.bad_words import BadWords


class TokenCounts:
    """How often each id occurs in a sequence that only grows."""

    _FEW = 32

    def __init__(self) -> None:
        self.ids = np.empty(0, dtype=np.int32)
        """int32[n], the distinct ids, ascending."""
        self.counts = np.empty(0, dtype=np.float32)
        """float32[n], occurrences of each of ``ids``; exact up to 2**24."""
        self._num_tokens = 0

    def follow(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Brings the counts up to ``token_ids``: what was counted before, and what came since."""
        new = token_ids[self._num_tokens :]
        self._num_tokens = len(token_ids)
        if len(new) > self._FEW:
            self.ids, counts = np.unique(token_ids, return_counts=True)
            self.counts = counts.astype(np.float32)
            return
        for token_id in new:
            place = int(np.searchsorted(self.ids, token_id))
            if place < len(self.ids) and self.ids[place] == token_id:
                self.counts[place] += 1
            else:
                self.ids = np.insert(self.ids, place, token_id)
                self.counts = np.insert(self.counts, place, 1)


class LogitEdits:
    """The changes of one request, in this order:

    1. ``logit_bias`` is added.
    2. Penalties, on every id seen in the prompt or generated: ``repetition_penalty`` divides a
       positive logit and multiplies a negative one; then ``presence_penalty`` is subtracted once,
       then ``frequency_penalty`` once for each occurrence. All three count the prompt, as
       TensorRT-LLM's do (OpenAI's presence and frequency count generated tokens alone): its
       clients tuned their values so, and one set of seen tokens is what can be explained.
    3. End ids are masked while fewer than ``min_tokens`` tokens were generated, and so is the last
       token of each bad word whose other tokens end the sequence.

    Masks that would leave nothing to choose are not applied at all: a request that forbids the
    whole vocabulary gets an answer as if it had not, and cannot fail the batch it is in.
    """

    def __init__(self, request: LlmRequest, vocab_size: int) -> None:
        """Reads the request's frozen part only; its tokens are read by ``edit_rows``."""
        ask = request.request
        self._config = ask.sampling_config
        self.bias_ids = np.fromiter(ask.logit_bias.keys(), dtype=np.int64)
        """int64[n], all different."""
        biases = np.fromiter(ask.logit_bias.values(), dtype=np.float64)
        self.biases = np.clip(biases, -LARGEST_LOGIT, LARGEST_LOGIT).astype(np.float32)
        """float32[n], what is added to the logits of ``bias_ids``."""
        self._counts = TokenCounts()
        self._end_ids = [i for i in dict.fromkeys(request.end_ids) if 0 <= i < vocab_size]
        self._bad_words = BadWords(ask.bad_words, max_total_tokens=request.max_total_tokens)

    @staticmethod
    def needed_by(request: LlmRequest) -> bool:
        """False when the request takes the logits as they are."""
        config = request.request.sampling_config
        return bool(
            request.request.logit_bias
            or config.has_penalties
            or (config.min_tokens and request.end_ids)
            or request.request.bad_words
        )

    @property
    def has_penalties(self) -> bool:
        """True when the tokens seen so far change the logits."""
        return self._config.has_penalties

    def masked_after(self, request: LlmRequest) -> list[int]:
        """The ids that are masked at the next position of the request, each once."""
        masked = self._bad_words.banned_after(request.token_ids)
        if request.num_generated_tokens < self._config.min_tokens:
            masked.extend(self._end_ids)
        return sorted(set(masked))

    def counts_of(self, request: LlmRequest) -> TokenCounts:
        """The counts of its tokens, which may have grown since the last call."""
        self._counts.follow(request.token_ids)
        return self._counts

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, presence, frequency."""
        config = self._config
        return config.repetition_penalty, config.presence_penalty, config.frequency_penalty


class EditedRow(NamedTuple):
    row: int
    """Which one of the logits."""
    request: LlmRequest
    edits: LogitEdits
    """Those of this request."""


def edit_rows(logits: npt.NDArray[np.float32], edited: Sequence[EditedRow]) -> None:
    """Edits rows of ``logits``, float32[R, vocab_size], C-contiguous, in place. Each one is named
    once and has a finite maximum, and keeps one."""
    for row, _, edits in edited:
        if len(edits.bias_ids):
            logits[row, edits.bias_ids] += edits.biases
    penalised = [each for each in edited if each.edits.has_penalties]
    if penalised:
        _penalise(logits, penalised)
    for row, request, edits in edited:
        masked = edits.masked_after(request)
        if masked:
            _mask(logits[row], np.asarray(masked, dtype=np.int64))


def _penalise(logits: npt.NDArray[np.float32], penalised: Sequence[EditedRow]) -> None:
    """All rows together: touches nothing but the ids that occur, and costs the same few calls of
    numpy whatever the number of rows."""
    counts = [edits.counts_of(request) for _, request, edits in penalised]
    lengths = [len(each.ids) for each in counts]
    starts = np.array([each.row for each in penalised]) * logits.shape[1]
    places = np.concatenate([each.ids for each in counts]) + np.repeat(starts, lengths)
    penalties = np.array([each.edits.penalties for each in penalised], dtype=np.float32)
    repetition, presence, frequency = (np.repeat(each, lengths) for each in penalties.T)
    assert logits.flags.c_contiguous  # lest `every` is a copy
    every = logits.reshape(-1)
    values = every[places]
    with np.errstate(over="ignore"):  # far below the peak -inf is right: probability 0
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= presence
        values -= frequency * np.concatenate([each.counts for each in counts])
    every[places] = values


def _mask(row: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> None:
    before = row[ids]
    row[ids] = -np.inf
    if row.max() == -np.inf:
        row[ids] = before
