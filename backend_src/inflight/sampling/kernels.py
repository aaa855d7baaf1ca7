"""SamplingKernels: the steps over whole rows of logits, and NumpySampling, which defines them."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from inflight.sampling.candidates import largest, nucleus
from inflight.sampling.draw import CounterGenerator, Draws, Words

Floats = npt.NDArray[np.float32]
RowIndices = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]

_RUN = 256
"""``pick`` sums weights in runs of this length before it looks inside one."""


class SamplingKernels(Protocol):
    """Used by one thread. ``logits``: float32[., V], C-contiguous. What is found of a row depends
    on its logits and its rules alone."""

    def uniforms(self, seeds: Words, sequence_index: int, positions: Words) -> Draws:
        """As ``CounterGenerator.uniforms``. May be called beside the others."""
        ...

    def likeliest(self, logits: Floats, rows: RowIndices) -> TokenIds:
        """int32[R]: the first of the largest logits of each of int64[R] ``rows``, unchecked, or
        its first NaN, as numpy's argmax."""
        ...

    def sample_rows(
        self, logits: Floats, rules: npt.NDArray[Any], *, normalize_log_probs: bool
    ) -> tuple[TokenIds, Floats, Floats]:
        """Of each row of float32[R, V] by RULES[R]: a token, int32[R], its log-prob, float32[R], 0
        where none is wanted, and the largest logit, float32[R], NaN if there is one. Of a row
        whose largest logit is not finite the others mean nothing.

        Temperature 0 chooses the likeliest. Else those survive that are among the top_k largest,
        not more than min_p_offset below the largest, and among the fewest largest weights
        exp((logit - largest) / temperature) of what is then left that sum to top_p of it, or more.
        Equal values rank by id, the lower one first. The token is the first survivor, by id, whose
        cumulative weight exceeds uniform times the sum of all; never one of weight 0.
        Log-probs are as ``Sampler`` says.
        """
        ...


class NumpySampling:
    """The reference, and what computes where there is no native library: row by row."""

    def __init__(self, vocab_size: int) -> None:
        self.uniforms = CounterGenerator().uniforms
        # Fresh arrays as large as a vocabulary cost more than the arithmetic on them.
        self._scratch = np.empty(vocab_size, dtype=np.float32)

    def likeliest(self, logits: Floats, rows: RowIndices) -> TokenIds:
        return np.array([logits[row].argmax() for row in rows.tolist()], dtype=np.int32)

    def sample_rows(
        self, logits: Floats, rules: npt.NDArray[Any], *, normalize_log_probs: bool
    ) -> tuple[TokenIds, Floats, Floats]:
        everything = np.arange(len(logits))
        token_ids = self.likeliest(logits, everything)
        maxima, log_probs = logits[everything, token_ids], np.zeros(len(logits), dtype=np.float32)
        with np.errstate(over="ignore"):  # far below the peak -inf is right: probability 0
            for i in np.flatnonzero(np.isfinite(maxima)).tolist():
                token_ids[i], log_probs[i] = self._sample(
                    logits[i], int(token_ids[i]), rules[i], normalize_log_probs
                )
        return token_ids, log_probs, maxima

    def _sample(
        self, row: Floats, likeliest: int, rules: Any, normalize_log_probs: bool
    ) -> tuple[int, float]:
        """Token and log-prob of one row."""
        peak = float(row[likeliest])
        token_id = likeliest
        weight = total = 1.0  # greedy: one survivor
        if rules["temperature"]:
            ids, weights = self.survivors(
                row,
                peak,
                temperature=float(rules["temperature"]),
                top_k=int(rules["top_k"]),
                top_p=float(rules["top_p"]),
                min_p_logit=peak + float(rules["min_p_offset"]),
            )
            place = self.pick(weights, float(rules["uniform"]))
            token_id = place if ids is None else int(ids[place])
            weight, total = float(weights[place]), float(weights.sum())
        if not rules["wants_log_prob"]:
            return token_id, 0.0
        if normalize_log_probs:
            return token_id, math.log(weight / total)
        _, weights = self.survivors(row, peak)
        return token_id, float(row[token_id]) - peak - math.log(float(weights.sum()))

    def survivors(
        self,
        row: Floats,
        peak: float,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p_logit: float | None = None,
    ) -> tuple[npt.NDArray[np.int64] | None, Floats]:
        """Surviving ids, int64[n] ascending (None: all), and their weights, float32[n], in a buffer
        that the next call overwrites. ``peak``: the row's maximum, finite; None: no such rule."""
        ids: npt.NDArray[np.int64] | None = None
        # top_k and min_p look at raw logits, which temperature keeps in order; the largest logit
        # passes both, so their order is free.
        if top_k is not None and top_k < len(row):
            ids = largest(row, top_k)
        if min_p_logit is not None and min_p_logit > -math.inf:
            least = np.float32(min_p_logit)  # lest the comparison widens the whole row
            ids = np.flatnonzero(row >= least) if ids is None else ids[row[ids] >= least]
        weights = self._weights(row if ids is None else row[ids], np.float32(peak), temperature)
        if top_p is not None and top_p < 1:
            kept = nucleus(weights, top_p)
            ids = kept if ids is None else ids[kept]
            weights = weights[kept]
        return ids, weights

    def pick(self, weights: Floats, uniform: float) -> int:
        """First index whose cumulative weight exceeds ``uniform``, in [0, 1), times the sum of
        float32[n] ``weights``, >= 0 and not all 0. Never an index of weight 0."""
        firsts = np.arange(0, len(weights), _RUN)
        runs = np.cumsum(np.add.reduceat(weights, firsts), dtype=np.float64)
        # uniform * sum may round up to the sum itself; every run must stay reachable, none beyond.
        target = min(uniform * runs[-1], np.nextafter(runs[-1], 0))
        run = int(np.searchsorted(runs, target, side="right"))
        before = runs[run - 1] if run else 0.0
        inside = weights[run * _RUN : (run + 1) * _RUN]
        sums = np.cumsum(inside, dtype=np.float64)
        place = int(np.searchsorted(sums, target - before, side="right"))
        if place == len(inside):  # the two sums of a run differ in their last bits
            place = int(np.flatnonzero(inside)[-1])
        return run * _RUN + place

    def _weights(self, logits: Floats, peak: np.float32, temperature: float) -> Floats:
        scratch = self._scratch[: len(logits)]
        with np.errstate(over="ignore"):  # as above
            np.subtract(logits, peak, out=scratch)
            if temperature != 1.0:
                scratch /= temperature
            np.exp(scratch, out=scratch)
        return scratch
