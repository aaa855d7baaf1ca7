"""SamplingKernels: the heavy steps over a vocabulary, and NumpySampling, which defines them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.sampling.candidates import largest, nucleus

Floats = npt.NDArray[np.float32]

_RUN = 256
"""``pick`` sums weights in runs of this length before it looks inside one."""


class SamplingKernels(Protocol):
    """Used by one thread. What a call returns may lie in buffers that the next one overwrites."""

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
        """Surviving ids, int64[n] ascending (None: all), and their weights exp((logit - peak) /
        temperature), float32[n].

        ``row``: float32[V] without NaN, ``peak`` its maximum, finite; ``temperature`` > 0. Those
        survive that are among the ``top_k`` (>= 1) largest, not below ``min_p_logit`` (<= peak),
        and among the fewest largest weights of what is then left that sum to ``top_p`` (0..1) of
        it, or more. Equal values rank by id, the lower one first. None: no such rule.
        """
        ...

    def pick(self, weights: Floats, uniform: float) -> int:
        """First index whose cumulative weight exceeds ``uniform`` times the sum of all weights.

        ``weights``: float32[n], >= 0, not all 0; ``uniform`` in [0, 1). Never an index of weight 0.
        """
        ...


class NumpySampling:
    """The reference, and what computes where there is no native library."""

    def __init__(self, vocab_size: int) -> None:
        # Fresh arrays as large as a vocabulary cost more than the arithmetic on them.
        self._scratch = np.empty(vocab_size, dtype=np.float32)

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
        ids: npt.NDArray[np.int64] | None = None
        # top_k and min_p look at raw logits, which temperature keeps in order; the largest logit
        # passes both, so their order is free.
        if top_k is not None and top_k < len(row):
            ids = largest(row, top_k)
        if min_p_logit is not None:
            least = np.float32(min_p_logit)  # lest the comparison widens the whole row
            ids = np.flatnonzero(row >= least) if ids is None else ids[row[ids] >= least]
        weights = self._weights(row if ids is None else row[ids], np.float32(peak), temperature)
        if top_p is not None and top_p < 1:
            kept = nucleus(weights, top_p)
            ids = kept if ids is None else ids[kept]
            weights = weights[kept]
        return ids, weights

    def pick(self, weights: Floats, uniform: float) -> int:
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
        with np.errstate(over="ignore"):  # far below the peak -inf is right: weight 0
            np.subtract(logits, peak, out=scratch)
            if temperature != 1.0:
                scratch /= temperature
            np.exp(scratch, out=scratch)
        return scratch
