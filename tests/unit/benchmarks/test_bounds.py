"""The least time of a workload, against the arithmetic of the embedded model done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.benchmarks.compare.bounds import ModelShape, least_seconds
from tests.benchmarks.compare.limits import Limits
from tests.benchmarks.compare.workloads import Job, Workload, make_workload

SMOLLM2 = ModelShape(
    layer_weights=106_168_320, head_weights=28_311_552, num_layers=30, attention_width=576
)
LIMITS = Limits(read_bytes=50e9, fp32_flops=150e9, bf16_flops=450e9, int8_ops=800e9)


def test_shape_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 10, "num_hidden_layers": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    matrices = {
        "model.embed_tokens.weight": (10, 8),
        "model.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.1.mlp.up_proj.weight": (16, 8),
        "model.layers.1.input_layernorm.weight": (8,),
    }
    tensors = {name: np.zeros(shape, np.float32) for name, shape in matrices.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert ModelShape.of_checkpoint(tmp_path) == ModelShape(256, 80, 2, 8)


@pytest.mark.parametrize(
    ("dtype", "megabytes"), [("fp32", 538), ("bf16", 269), ("int8", 143), ("int4", 76)]
)
def test_weights_of_the_embedded_model(dtype: str, megabytes: int) -> None:
    assert SMOLLM2.weight_bytes(dtype) / 1e6 == pytest.approx(megabytes, abs=0.6)


def test_attention_counts_each_pair_of_positions_once() -> None:
    shape = ModelShape(layer_weights=0, head_weights=0, num_layers=1, attention_width=1)
    three_and_two = Workload("x", (Job(0, (1, 2, 3), 2),), concurrency=1)
    assert shape.flops(three_and_two) == 4 * (1 + 2 + 3 + 4)


def test_the_last_token_is_made_and_not_fed_back() -> None:
    shape = ModelShape(layer_weights=100, head_weights=10, num_layers=0, attention_width=0)
    assert shape.flops(Workload("x", (Job(0, (1, 2, 3), 2),), 1)) == 2 * 100 * 4 + 2 * 10 * 2


def test_one_stream_is_bounded_by_reading() -> None:
    assert least_seconds(make_workload("W1", 0), SMOLLM2, "bf16", LIMITS) == pytest.approx(
        128 * 268_959_744 / 50e9
    )


def test_a_long_context_is_bounded_by_arithmetic() -> None:
    flops = 2 * 106_168_320 * 2048 + 2 * 28_311_552 + 4 * 30 * 576 * 2048 * 2049 // 2
    assert SMOLLM2.flops(make_workload("W5", 0)) == flops
    assert least_seconds(make_workload("W5", 0), SMOLLM2, "bf16", LIMITS) == flops / 450e9


def test_blocks_may_be_multiplied_as_bf16() -> None:
    assert LIMITS.flops_for("fp32") == 150e9
    assert LIMITS.flops_for("bf16") == 450e9
    assert LIMITS.flops_for("int8") == LIMITS.flops_for("int4") == 800e9
    slow_int8 = Limits(read_bytes=1, fp32_flops=1, bf16_flops=9, int8_ops=3)
    assert slow_int8.flops_for("int8") == 9


def test_a_reused_prefix_is_computed_once() -> None:
    shape = ModelShape(layer_weights=1, head_weights=0, num_layers=0, attention_width=0)
    alone = shape.flops(make_workload("W4off", 0))
    shared = shape.flops(make_workload("W4", 0))
    assert alone - shared == 2 * 31 * 1024


def test_waiting_requests_need_iterations_of_their_own() -> None:
    jobs = tuple(Job(place, (1,), 10) for place in range(6))
    shape = ModelShape(layer_weights=50, head_weights=0, num_layers=0, attention_width=0)
    slow_reads = Limits(read_bytes=100.0, fp32_flops=1e9, bf16_flops=1e9, int8_ops=1e9)
    assert least_seconds(Workload("x", jobs, 6), shape, "bf16", slow_reads) == 10
    assert least_seconds(Workload("x", jobs, 2), shape, "bf16", slow_reads) == 30
