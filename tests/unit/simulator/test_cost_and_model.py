"""Cost models from files and derivations, model sizes from config.json, lengths from words."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.errors import ConfigError
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator.calibration_file import (
    Calibration,
    load_calibration,
    save_calibration,
)
from inflight.simulator.cost_model import CostModel, derived_cost
from inflight.simulator.example import EXAMPLE_COST, example_trace
from inflight.simulator.model_shape import EMBEDDED_MODEL, ModelShape
from inflight.simulator.tiers import Bandwidth
from inflight.simulator.traffic import Lengths, Traffic

TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 50,
}


def shape_of(config: dict[str, Any], dtype: str = "bf16", kv: str = "auto") -> ModelShape:
    return ModelShape.of(config, dtype=dtype, kv_cache_dtype=kv)


def test_the_sizes_of_a_tiny_model() -> None:
    shape = shape_of(TINY)
    attention, feed_forward, embedding = 8 * 8 * 2 + 8 * 4 * 2, 3 * 8 * 10, 50 * 8
    assert shape.num_weights == 2 * (attention + feed_forward) + 2 * embedding
    assert shape.num_active_weights == 2 * (attention + feed_forward) + embedding
    assert shape.weight_bytes == 2 * shape.num_weights
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 2 * 2  # K and V, layers, heads, head_dim, bytes
    assert shape.with_weights(7).weight_bytes == 14


def test_experts_count_in_memory_and_only_the_chosen_ones_in_time() -> None:
    mixture = {**TINY, "num_local_experts": 8, "num_experts_per_tok": 2}
    dense, shape = shape_of(TINY), shape_of(mixture)
    assert shape.num_weights - dense.num_weights == 2 * 7 * 3 * 8 * 10
    assert shape.num_active_weights - dense.num_active_weights == 2 * 3 * 8 * 10


@pytest.mark.parametrize(
    ("dtype", "kv", "head_bytes"),
    [("bf16", "auto", 4), ("fp32", "auto", 8), ("int4", "fp32", 8), ("bf16", "int8", 2 + 4)],
)
def test_kv_bytes_follow_the_dtypes(dtype: str, kv: str, head_bytes: int) -> None:
    assert shape_of(TINY, dtype, kv).kv_bytes_per_token == 2 * 2 * 2 * head_bytes


def test_the_embedded_model_and_nested_configurations() -> None:
    assert shape_of({"text_config": EMBEDDED_MODEL}) == shape_of(EMBEDDED_MODEL)
    assert shape_of(EMBEDDED_MODEL).num_weights == pytest.approx(134.5e6, rel=0.01)
    assert shape_of(EMBEDDED_MODEL).kv_bytes_per_token == 23040


@pytest.mark.parametrize("value", [0, -1, "8", 2.0, True, 1 << 40, None])
def test_a_config_that_makes_no_sense_names_the_key(value: object) -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        shape_of({**TINY, "hidden_size": value})


def test_the_derived_cost_is_a_roofline() -> None:
    model = shape_of(TINY)
    cost = derived_cost(model, flops_per_second=1e6, bytes_per_second=1e4, base_seconds=0.5)
    read = model.weight_bytes / 1e4
    few = IterationShape(0, 0, 1, 10)
    assert cost.seconds(few) == pytest.approx(0.5 + read + 10 * model.kv_bytes_per_token / 1e4)
    many = IterationShape(1000, 500_500, 0, 0)
    flops = 1000 * 2 * model.num_active_weights + 500_500 * 4 * (2 * 4 * 2)
    assert cost.seconds(many) == pytest.approx(0.5 + flops / 1e6)
    with pytest.raises(ConfigError, match="--bandwidth"):
        derived_cost(model, flops_per_second=1, bytes_per_second=math.nan, base_seconds=0)


def test_a_cost_model_comes_back_from_its_file(tmp_path: Path) -> None:
    measured = Calibration(EXAMPLE_COST, host=Bandwidth(3e9, 2e9))
    for calibration in (Calibration(EXAMPLE_COST), measured):
        save_calibration(tmp_path / "cost.json", calibration)
        assert load_calibration(tmp_path / "cost.json") == calibration
    with pytest.raises(ConfigError, match="cannot|No such"):
        save_calibration(tmp_path / "nowhere" / "cost.json", measured)


GOOD = {
    "base_seconds": 0.1,
    "context_token_seconds": 0,
    "generation_row_seconds": 0,
    "context_pair_seconds": 0,
    "generation_pair_seconds": 0,
}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "must hold a JSON object"),
        ("{", "not valid JSON"),
        (json.dumps({**GOOD, "speed": 1}), "speed: there is no such coefficient"),
        (json.dumps({"base_seconds": 1}), "context_pair_seconds is missing"),
        (json.dumps({**GOOD, "base_seconds": "1"}), "coefficients must be numbers"),
        (json.dumps({**GOOD, "base_seconds": -1}), "base_seconds: -1.0 must be 0 or larger"),
        (json.dumps({**GOOD, "base_seconds": math.nan}), "base_seconds: nan must be"),
        (json.dumps({**GOOD, "base_seconds": 0}), "must take more than 0 seconds"),
        ("[" * 60_000, "not valid JSON"),
        (json.dumps({**GOOD, "host_up": 1}), "host_down is missing"),
        (json.dumps({**GOOD, "disk_up": 1, "disk_down": 0}), "must be larger than 0"),
        (json.dumps({**GOOD, "disk_up": 10**400, "disk_down": 1}), "a number is too large"),
    ],
)
def test_a_wrong_cost_file_is_told_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_calibration(tmp_path / "cost.json")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_iterations_that_take_no_time_are_refused() -> None:
    nothing = dict.fromkeys(GOOD, 0.0)
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        CostModel(**nothing)
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        CostModel(**{**nothing, "context_token_seconds": 1.0})


@pytest.mark.parametrize(
    ("text", "mean", "p95"),
    [("300", 300, 300), ("p50=200,p95=900", None, 900), ("mean=300, p95=800", 300, 800)],
)
def test_lengths_have_what_was_asked(text: str, mean: float | None, p95: float) -> None:
    lengths = Lengths.parse("--input-lengths", text)
    assert lengths.p95 == pytest.approx(p95)
    assert mean is None or lengths.mean == pytest.approx(mean)
    rng = random.Random(1)
    drawn = [lengths.draw(rng, 10**6) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(lengths.mean, rel=0.05)
    assert np.percentile(drawn, 95) == pytest.approx(lengths.p95, rel=0.05)


def test_mean_and_median() -> None:
    lengths = Lengths.parse("", "mean=300,p50=200")
    assert (lengths.mean, math.exp(lengths.mu)) == pytest.approx((300, 200))


@pytest.mark.parametrize(
    "text",
    [
        "", "many", "0", "1e9", "nan", "p50=10", "p50=10,p95=5", "p50=10,mean=5",
        "mean=10,p95=10000", "p50=1,p50=2", "p50=1,p95=2,mean=1", "p50=1,300", "p10=1,p95=2",
    ],
)  # fmt: skip
def test_lengths_that_make_no_sense_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-lengths"):
        Lengths.parse("--input-lengths", text)


def test_traffic_keeps_to_its_description() -> None:
    traffic = Traffic(
        input_lengths=Lengths.parse("", "p50=100,p95=400"),
        output_lengths=Lengths.parse("", "50"),
        requests_per_second=4.0,
        shared_prefix=64,
        num_groups=3,
    )
    trace = traffic.trace(2000, seed=3, max_seq_len=300)
    assert trace == traffic.trace(2000, seed=3, max_seq_len=300)
    assert trace != traffic.trace(2000, seed=4, max_seq_len=300)
    assert trace[-1].arrival == pytest.approx(500, rel=0.1)
    assert all(r.input_length + r.output_length <= 300 for r in trace)
    assert all(sum(p.num_tokens for p in r.prefix) < r.input_length for r in trace)
    assert len({r.prefix[0].name for r in trace if r.prefix}) == 3


def test_the_example_is_the_same_everywhere() -> None:
    trace = example_trace()
    assert len(trace) == 600
    assert trace == example_trace()
    assert trace == sorted(trace, key=lambda request: request.arrival)
