"""OnboardCost: bytes over bandwidth against tokens over speed, by hand."""

from __future__ import annotations

import pytest

from inflight.kv_cache.tiers.cascade import Place
from inflight.kv_cache.tiers.cost import OnboardCost, Rate

HOST, DISK = Place.HOST, Place.DISK


def measured(*, tokens: int, host: int, disk: int) -> OnboardCost:
    """All per second; a block is 1000 bytes and 10 tokens."""
    cost = OnboardCost(1000, 10)
    cost.context.observe(tokens, 1.0)
    cost.bandwidth[HOST].observe(host, 1.0)
    cost.bandwidth[DISK].observe(disk, 1.0)
    return cost


def test_a_rate_follows_the_latest_measurements() -> None:
    rate = Rate()
    assert rate.per_second is None and rate.seconds(5) is None
    rate.observe(100, 1.0)
    assert rate.per_second == pytest.approx(100)
    rate.observe(100, 2.0)  # 0.01 + 0.2 * (0.02 - 0.01) seconds each
    assert rate.seconds(1000) == pytest.approx(12.0)
    rate.observe(0, 5.0)
    assert rate.seconds(1000) == pytest.approx(12.0)


def test_what_was_never_measured_is_tried() -> None:
    cost = OnboardCost(1000, 10)
    assert cost.num_worthwhile([HOST, DISK]) == 2
    assert cost.num_worthwhile([]) == 0


def test_blocks_come_back_only_where_that_is_faster() -> None:
    # A block: computing 0.1 s, host 0.01 s, disk 0.2 + 0.01 s.
    cost = measured(tokens=100, host=100_000, disk=5000)
    assert cost.num_worthwhile([HOST, HOST]) == 2
    assert cost.num_worthwhile([DISK, DISK]) == 0
    assert cost.num_worthwhile([HOST, DISK]) == 1
    # The slow first block is worth it for what comes after: 3 * 0.1 > 0.2 + 3 * 0.01.
    assert cost.num_worthwhile([DISK, HOST, HOST]) == 3
    assert cost.num_worthwhile([DISK, HOST]) == 0


def test_a_refused_tier_is_measured_again_now_and_then() -> None:
    cost = measured(tokens=100, host=100, disk=100)
    answers = [cost.num_worthwhile([DISK]) for _ in range(128)]
    assert answers.count(1) == 2 and answers[63] == answers[127] == 1
