"""IterationCost: what an iteration takes on this machine, learned from those that ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.batch import ScheduledBatch, ScheduledChunk

_WINDOW = 64
"""Iterations remembered with contexts, and as many without."""

_FIT_PASSES = 4
"""Of iteratively reweighted least squares: the sum of absolute errors settles in a few."""

_LEAST_ERROR = 1e-3
"""Relative errors below this weigh alike in a fit; clocks and caches jitter as much."""

_TAIL_OVER_MEDIAN_ERROR = 1.645 / 0.6745
"""Standard deviations below which 95% of a normal distribution lie, and within which half does."""

Floats = npt.NDArray[np.float64]


class IterationShape(NamedTuple):
    """What the time of an iteration depends on; the model is linear in these."""

    num_context_tokens: int
    num_context_pairs: int
    """Pairs of a context row and a token that it attends to."""
    num_generations: int
    num_generation_pairs: int

    @staticmethod
    def of(plan: ScheduledBatch) -> IterationShape:
        pairs = sum(context_pairs(chunk.start, chunk.num_tokens) for chunk in plan.context)
        return IterationShape(
            plan.num_context_tokens, pairs, len(plan.generation), generation_pairs(plan.generation)
        )


def context_pairs(start: int, num_tokens: int) -> int:
    """Row i of a chunk attends to start + i + 1 tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def generation_pairs(generation: Iterable[ScheduledChunk]) -> int:
    """Each row attends to its whole sequence, itself included."""
    return sum(chunk.end for chunk in generation)


class IterationCost:
    """seconds = c0 + c . shape, with no negative coefficient, from a window of measurements.

    The fit makes the sum of relative absolute errors small, so that a hiccup of the machine counts
    little however long it took. It is made when it is asked for, after new measurements.
    """

    def __init__(self) -> None:
        self._with_contexts = _Ring()
        self._without = _Ring()
        self._coefficients: Floats | None = None
        self._tail = 1.0

    @property
    def largest_context(self) -> int:
        """The most context tokens of a remembered iteration; 0 = none was measured."""
        return int(self._with_contexts.shapes[:, 1].max(initial=0.0))

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """An iteration of this shape took so long (> 0)."""
        ring = self._with_contexts if shape.num_context_tokens else self._without
        ring.add((1.0, *shape), seconds)
        self._coefficients = None

    def seconds(self, shape: IterationShape) -> float:
        """The expected time; there has been a measurement."""
        return float(self._fitted() @ np.array((1.0, *shape)))

    def tail_factor(self) -> float:
        """Of 20 iterations with contexts 19 take at most this many times what ``seconds`` says.

        1 + 2.44 times the median relative error, which is that of a normal distribution: hiccups
        that no chunk size would have prevented do not count.
        """
        self._fitted()
        return self._tail

    def context_coefficients(self) -> tuple[float, float]:
        """Seconds for a context token and for a context pair."""
        _, per_token, per_pair, _, _ = self._fitted().tolist()
        return per_token, per_pair

    def _fitted(self) -> Floats:
        if self._coefficients is None:
            shapes = np.concatenate((self._with_contexts.shapes, self._without.shapes))
            times = np.concatenate((self._with_contexts.times, self._without.times))
            self._coefficients = _fit(shapes, times)
            self._tail = self._measure_tail(self._coefficients)
        return self._coefficients

    def _measure_tail(self, coefficients: Floats) -> float:
        expected = self._with_contexts.shapes @ coefficients
        known = expected > 0
        if not known.any():
            return 1.0
        errors = np.abs(self._with_contexts.times[known] / expected[known] - 1)
        return 1 + _TAIL_OVER_MEDIAN_ERROR * float(np.median(errors))


class _Ring:
    """The last ``_WINDOW`` measurements."""

    def __init__(self) -> None:
        self._shapes = np.zeros((_WINDOW, 1 + len(IterationShape._fields)))
        self._times = np.zeros(_WINDOW)
        self._num_added = 0

    @property
    def shapes(self) -> Floats:
        """float64[n, 5]: 1 and the shape."""
        return self._shapes[: self._num_added]

    @property
    def times(self) -> Floats:
        """float64[n], seconds."""
        return self._times[: self._num_added]

    def add(self, shape: tuple[float, ...], seconds: float) -> None:
        assert seconds > 0
        place = self._num_added % _WINDOW
        self._shapes[place], self._times[place] = shape, seconds
        self._num_added += 1


def _fit(shapes: Floats, times: Floats) -> Floats:
    """float64[5]: coefficients >= 0 for which sum(|shapes @ c - times| / times) is small."""
    rows = shapes / times[:, None]
    weights = np.ones(len(rows))
    for _ in range(_FIT_PASSES):
        coefficients = _least_squares(rows * weights[:, None], weights)
        errors = np.abs(rows @ coefficients - 1)
        weights = 1 / np.sqrt(np.maximum(errors, _LEAST_ERROR))
    return coefficients


def _least_squares(rows: Floats, wanted: Floats) -> Floats:
    """Least squares; columns whose coefficient would be negative are left out, the worst first."""
    scale = np.abs(rows).max(axis=0)
    used = np.flatnonzero(scale > 0)
    while True:
        solution = np.zeros(rows.shape[1])
        scaled = rows[:, used] / scale[used]
        solution[used] = np.linalg.lstsq(scaled, wanted, rcond=None)[0] / scale[used]
        contributions = solution[used] * scale[used]
        if contributions.min(initial=0.0) >= 0:
            return solution
        used = np.delete(used, contributions.argmin())
