"""Sliding windows in config.json, and what they change in a simulation and a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inflight.api.kv_pools import KvGroup, group_layers
from inflight.engine.memory import KvMemory
from inflight.engine.pools import kv_pools, layer_groups
from inflight.simulator.arrivals import OpenArrivals
from inflight.simulator.layer_windows import windows_of
from inflight.simulator.model_shape import ModelShape
from inflight.simulator.planner import capacity
from inflight.simulator.simulation import Simulation
from inflight.simulator.trace import TraceRequest
from tests.unit.simulator.test_cost_and_model import TINY
from tests.unit.simulator.test_planner import KV_BYTES, MODEL, ask
from tests.unit.simulator.test_simulation import COST, make_config

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [None, None, None]),
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None, None]),
        ({"model_type": "gemma2", "sliding_window": 8}, [8, None, 8]),
        ({"sliding_window": 8, "layer_types": MIXED}, [8, None, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, None]),
        ({"sliding_window": 8, "use_sliding_window": False, "layer_types": MIXED}, [None] * 3),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        ({"sliding_window": 8, "model_type": "unheard_of"}, [None, None, None]),
        ({"sliding_window": "8", "layer_types": MIXED}, [None, None, None]),
    ],
)
def test_windows_as_config_json_tells_them(
    config: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows_of(config, 3) == expected


def test_a_shape_has_its_layers_by_window() -> None:
    nested = {**TINY, "sliding_window": 8, "layer_types": MIXED[:2]}
    shape = ModelShape.of({"text_config": nested}, dtype="bf16", kv_cache_dtype="auto")
    half = shape.kv_bytes_per_token // 2
    assert shape.layer_groups == (KvGroup(None, (1,), half), KvGroup(8, (0,), half))
    plain = ModelShape.of(TINY, dtype="bf16", kv_cache_dtype="auto")
    assert plain.layer_groups == group_layers([None, None], [half, half]) == ()


def test_a_plan_counts_blocks_as_the_engine_does() -> None:
    """Half of the KV has a window of 64 tokens: 3 blocks of 32 while a request generates, against
    5 of its 160 tokens and 16 of 512."""
    groups = (KvGroup(None, (0,), KV_BYTES // 2), KvGroup(64, (1,), KV_BYTES // 2))
    question = ask(3200, model=replace(MODEL, layer_groups=groups))
    fits, plain = capacity(question, question.limits), capacity(ask(3200), question.limits)
    kv = replace(question.limits.kv_cache_config, free_memory_fraction=0.9)
    limits = replace(question.limits, kv_cache_config=kv, max_batch_size=64)
    memory = KvMemory(question.free_bytes)
    pools, _ = kv_pools(limits, layer_groups(question.model, limits), memory)
    # Of 200 blocks of one half: n, 3 for each 16 of them, and 4 for a chunk of 128 tokens.
    assert fits.num_blocks == 165
    assert pools[0].num_blocks in (164, 165), "the engine counts memory in whole shares first"
    assert (plain.fit_typical, plain.fit_longest) == (20, 6)
    assert fits.fit_longest == min(pools[0].num_blocks // 16, pools[1].num_blocks // 3) == 10
    assert fits.fit_typical == min(pools[0].num_blocks // 5, pools[1].num_blocks // 3)


def test_a_simulation_gives_back_what_a_window_has_passed() -> None:
    """A pool of 12 blocks of 4 tokens runs an answer that needs 16."""
    trace = [TraceRequest(0.0, 20, 44)]
    whole = Simulation(make_config(), COST, num_blocks=12).run(OpenArrivals(trace))
    assert whole.num_refused == 1
    groups = (KvGroup(8, (0,), 1),)
    windowed = Simulation(make_config(), COST, num_blocks=12, groups=groups)
    outcome = windowed.run(OpenArrivals(trace))
    assert (outcome.num_refused, outcome.num_completed) == (0, 1)
    assert outcome.peak_kv_use == pytest.approx(3 / 12)
