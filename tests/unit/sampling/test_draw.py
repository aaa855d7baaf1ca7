"""The draw: addressed by (seed, sequence_index, position), the same everywhere, and uniform."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.sampling.draw import CounterGenerator

LARGEST = 2**64 - 1


@pytest.mark.parametrize(
    ("address", "bits"),
    [
        ((0, 0, 0), 104003916602523),
        ((0, 0, 1), 4525033197209392),
        ((0, 1, 0), 7326042091893818),
        ((1, 0, 0), 2734297772371024),
        ((LARGEST, LARGEST, LARGEST), 53282619646271),
    ],
)
def test_known_values(address: tuple[int, int, int], bits: int) -> None:
    assert CounterGenerator().uniform(*address) == bits / 2**53


def test_the_address_alone_decides() -> None:
    addresses = [(seed, 0, position) for seed in range(20) for position in range(20)]
    alone = [CounterGenerator().uniform(*address) for address in addresses]
    shared = CounterGenerator()
    backwards = [shared.uniform(*address) for address in reversed(addresses)]
    assert backwards[::-1] == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize("count", [0, 1, 95, 96, 300])
def test_many_at_once_are_those_of_one_after_the_other(count: int) -> None:
    rng = np.random.default_rng(count)
    seeds = rng.integers(0, LARGEST, size=count, dtype=np.uint64, endpoint=True)
    positions = rng.integers(0, 2**40, size=count, dtype=np.uint64)
    seeds[::7], seeds[3::7] = LARGEST, 0
    generator = CounterGenerator()
    draws = generator.uniforms(seeds, 3, positions)
    alone = [generator.uniform(int(s), 3, int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert draws.dtype == np.float64 and draws.tolist() == alone


@pytest.mark.parametrize("axis", ["seed", "sequence_index", "position"])
def test_uniform_along_each_axis(axis: str) -> None:
    """Chi-square of 20,000 draws in 100 bins: 99 degrees of freedom, 1 in 10,000 above 161."""
    generator = CounterGenerator()
    fixed = {"seed": 7, "sequence_index": 0, "position": 11}
    draws = np.array([generator.uniform(**{**fixed, axis: i}) for i in range(20_000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.bincount((draws * 100).astype(int), minlength=100)
    assert ((counts - 200) ** 2 / 200).sum() < 161


def test_neighbours_do_not_follow_each_other() -> None:
    generator = CounterGenerator()
    draws = np.array([[generator.uniform(s, 0, p) for p in range(200)] for s in range(100)])
    for first, second in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 4 / first.size**0.5
