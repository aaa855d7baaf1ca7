"""Which tokens survive top_k, min_p and top_p, without sorting the vocabulary.

Indices are int64 and ascending. Equal values rank by index, the lower one first, so each result is
one well-defined set.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_HEAD = 256
"""A nucleus is first looked for in this many of the largest weights."""

_COLUMNS_PER_WANTED = 16
"""More columns give fewer false candidates and a longer partition; 8 to 32 take the same time."""


def largest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of the ``count`` largest of ``values``, float32[n] without NaN; 1 <= count."""
    if count >= len(values):
        return np.arange(len(values))
    near = _near_largest(values, count)
    near_values = values[near]
    last = np.partition(near_values, len(near) - count)[len(near) - count]
    above = np.flatnonzero(near_values > last)
    equal = np.flatnonzero(near_values == last)[: count - len(above)]
    kept: npt.NDArray[np.int64] = near[np.sort(np.concatenate((above, equal)))]
    return kept


def nucleus(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the fewest largest weights that sum to ``top_p`` (0..1] of all, or more.

    ``weights``: float32[n], probabilities times any common factor; n >= 1.
    """
    wanted = top_p * float(weights.sum())
    for size in (_HEAD, len(weights)):
        head = largest(weights, size)
        reached = np.cumsum(np.sort(weights[head])[::-1], dtype=np.float64)
        if reached[-1] >= wanted:
            break
    # Rounding can leave the sum of all just below ``wanted``: then everything is needed.
    count = min(int(np.searchsorted(reached, wanted)) + 1, len(reached))
    kept: npt.NDArray[np.int64] = head[largest(weights[head], count)]
    return kept


def _near_largest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of all values that are at least a lower bound of the ``count``-th largest.

    Partitioning a whole vocabulary is slow. Cut into columns, the count-th largest of the column
    maxima is such a bound, and few more than ``count`` values reach it.
    """
    columns = count * _COLUMNS_PER_WANTED
    height = len(values) // columns
    if height < 2:
        return np.arange(len(values))
    maxima = values[: height * columns].reshape(height, columns).max(axis=0)
    bound = np.partition(maxima, columns - count)[columns - count]
    return np.flatnonzero(values >= bound)
