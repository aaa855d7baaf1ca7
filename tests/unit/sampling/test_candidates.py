"""Selection without sorting finds exactly what sorting finds, ties included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.sampling.candidates import largest, nucleus

Values = npt.NDArray[np.float32]


def ranked(values: Values) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def values_of(seed: int, size: int, levels: int) -> Values:
    """``size`` values on ``levels`` distinct levels: few levels make many ties."""
    generator = np.random.default_rng(seed)
    return generator.integers(levels, size=size).astype(np.float32) / levels


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 6000),
    levels=st.sampled_from([1, 3, 50, 100_000]),
    data=st.data(),
)
def test_largest_is_the_head_of_a_sort(
    seed: int, size: int, levels: int, data: st.DataObject
) -> None:
    values = values_of(seed, size, levels)
    count = data.draw(st.integers(1, size + 2))
    assert largest(values, count).tolist() == sorted(ranked(values)[:count])


def test_largest_with_masked_values() -> None:
    values = np.full(5000, -np.inf, dtype=np.float32)
    values[[4, 4000]] = (1, 2)
    assert largest(values, 3).tolist() == [0, 4, 4000]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3000),
    levels=st.sampled_from([3, 50, 100_000]),
    spread=st.sampled_from([0.1, 5.0, 30.0]),
    top_p=st.floats(0.01, 0.999),
)
def test_nucleus_is_the_shortest_head_that_reaches_top_p(
    seed: int, size: int, levels: int, spread: float, top_p: float
) -> None:
    weights = np.exp(values_of(seed, size, levels) * np.float32(spread))
    kept = nucleus(weights, top_p)
    order = ranked(weights)
    assert kept.tolist() == sorted(order[: len(kept)])
    total = weights.sum(dtype=np.float64)
    sums = np.cumsum(weights[order], dtype=np.float64) / total
    assert sums[len(kept) - 1] >= top_p - 1e-6
    assert len(kept) == 1 or sums[len(kept) - 2] < top_p + 1e-6


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
def test_nucleus_of_a_flat_distribution_is_its_share(size: int) -> None:
    """Longer than the head that is looked at first, and all equal: the worst case."""
    kept = nucleus(np.ones(size, dtype=np.float32), 0.5)
    assert kept.tolist() == list(range((size + 1) // 2))
