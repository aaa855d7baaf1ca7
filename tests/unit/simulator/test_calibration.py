"""What calibration reads off an engine whose times are known."""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace

import pytest

from inflight.api import ExecutorConfig
from inflight.cli import calibration
from inflight.errors import ConfigError
from inflight.simulator import CostModel
from tests.fakes.clock_runner import ClockRunner

COST = CostModel(
    base_seconds=8e-3,
    context_token_seconds=2.5e-4,
    generation_row_seconds=4e-4,
    context_pair_seconds=5e-8,
    generation_pair_seconds=4e-7,
)


def measured(runner: ClockRunner, limits: ExecutorConfig, patch: pytest.MonkeyPatch) -> CostModel:
    clock = SimpleNamespace(perf_counter=lambda: runner.now)
    patch.setattr(calibration, "time", clock)
    return calibration.measure(runner, limits).cost


def test_the_coefficients_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ExecutorConfig(max_batch_size=64, max_num_tokens=512, max_seq_len=4096)
    cost = measured(ClockRunner(COST), limits, monkeypatch)
    assert astuple(cost) == pytest.approx(astuple(COST), rel=1e-4)


def test_it_keeps_to_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ExecutorConfig(max_batch_size=2, max_num_tokens=40, max_seq_len=48)
    runner = ClockRunner(COST)
    cost = measured(runner, limits, monkeypatch)
    assert max(shape.num_generations for shape in runner.shapes) == 2
    assert max(s.num_context_tokens + s.num_generations for s in runner.shapes) <= 40
    assert cost.base_seconds > 0


def test_without_room_it_says_so() -> None:
    limits = ExecutorConfig(max_batch_size=2, max_num_tokens=40, max_seq_len=31)
    with pytest.raises(ConfigError, match="max_seq_len: 31: to measure, 32 are needed"):
        calibration.measure(ClockRunner(COST), limits)
