"""IterationCost: what an iteration takes on this machine, learned from those that ran."""

from __future__ import annotations

from collections import deque
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

_PACE_WINDOW = 5
"""Iterations whose median says how fast the machine is just now."""

_TAIL_QUANTILE = 0.95

_HICCUP = 2.0
"""Iterations that take so many times what was expected are the machine's, whatever their shape."""

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
    """seconds = pace * (c0 + c . shape), with no negative coefficient, from measurements.

    The fit makes the sum of relative absolute errors small, so that a hiccup of the machine counts
    little however long it took. It is made when it is asked for, after new measurements. Machines
    also have slower and faster minutes, which a window of many iterations learns late: ``pace`` is
    the median of the last few measurements over what the fit says of them.
    """

    def __init__(self) -> None:
        self._with_contexts = _Ring()
        self._without = _Ring()
        self._coefficients = np.zeros(1 + len(IterationShape._fields))
        self._is_fitted = True
        self._paces: deque[float] = deque(maxlen=_PACE_WINDOW)
        """Of the last iterations: what they took over what the fit of then said."""
        self._misses: deque[float] = deque(maxlen=_WINDOW)
        """Of the last iterations with contexts: what they took over what was expected."""

    @property
    def largest_context(self) -> int:
        """The most context tokens of a remembered iteration; 0 = none was measured."""
        return int(self._with_contexts.shapes[:, 1].max(initial=0.0))

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """An iteration of this shape took so long (> 0)."""
        row = (1.0, *shape)
        fitted = float(self._coefficients @ np.array(row))
        if fitted > 0:
            if shape.num_context_tokens:
                self._misses.append(seconds / (fitted * self._pace()))
            self._paces.append(seconds / fitted)
        ring = self._with_contexts if shape.num_context_tokens else self._without
        ring.add(row, seconds)
        self._is_fitted = False

    def seconds(self, shape: IterationShape) -> float:
        """The expected time; there has been a measurement."""
        return float(self._fitted() @ np.array((1.0, *shape))) * self._pace()

    def tail_factor(self) -> float:
        """Of 20 iterations with contexts 19 take at most this many times what ``seconds`` says.

        From what was said of earlier ones before they ran. Hiccups that no chunk size would have
        prevented do not count.
        """
        misses = [miss for miss in self._misses if miss < _HICCUP]
        return max(1.0, float(np.quantile(misses, _TAIL_QUANTILE))) if misses else 1.0

    def context_coefficients(self) -> tuple[float, float]:
        """Seconds for a context token and for a context pair."""
        _, per_token, per_pair, _, _ = (self._fitted() * self._pace()).tolist()
        return per_token, per_pair

    def _pace(self) -> float:
        return float(np.median(self._paces)) if self._paces else 1.0

    def _fitted(self) -> Floats:
        if not self._is_fitted:
            rows = np.concatenate((self._with_contexts.shapes, self._without.shapes))
            times = np.concatenate((self._with_contexts.times, self._without.times))
            self._coefficients = _fit(rows, times)
            self._is_fitted = True
        return self._coefficients


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
