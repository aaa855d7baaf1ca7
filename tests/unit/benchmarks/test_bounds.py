"""The least time of a workload, against the arithmetic of the embedded model done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inflight.checkpoint.files import GGUF_BLOCKS_FILE
from tests.benchmarks.compare.bounds import ModelShape, least_seconds
from tests.benchmarks.compare.limits import Limits
from tests.benchmarks.compare.workloads import Job, Workload, make_workload


def shape_of(**changes: int) -> ModelShape:
    """The embedded model's in bf16."""
    values = {
        "layer_weights": 106_168_320, "head_weights": 28_311_552, "num_layers": 30,
        "attention_width": 576, "weight_bytes": 268_959_744,
    }  # fmt: skip
    return ModelShape(**values | changes)


SMOLLM2 = shape_of()
LIMITS = Limits(read_bytes=50e9, fp32_flops=150e9, bf16_flops=450e9, int8_ops=800e9)


CONFIG = {
    "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 96, "num_hidden_layers": 2,
}  # fmt: skip
LAYER_0, LAYER_1 = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two layers of 64 x 32 and a tied head of 96 x 32, in floats."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {EMBEDDING: (96, 32), LAYER_0: (64, 32), LAYER_1: (64, 32)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tensors["model.layers.1.input_layernorm.weight"] = np.zeros(32, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_shape_is_read_from_a_checkpoint(checkpoint: Path) -> None:
    assert ModelShape.of_checkpoint(checkpoint, "bf16") == ModelShape(
        layer_weights=2 * 64 * 32,
        head_weights=96 * 32,
        num_layers=2,
        attention_width=32,
        weight_bytes=2 * (2 * 64 * 32 + 96 * 32),
    )


@pytest.mark.parametrize(
    ("dtype", "bytes_of_a_block"), [("fp32", 128), ("bf16", 64), ("int8", 34), ("int4", 20)]
)
def test_floats_are_read_in_the_blocks_of_the_dtype(
    checkpoint: Path, dtype: str, bytes_of_a_block: int
) -> None:
    shape = ModelShape.of_checkpoint(checkpoint, dtype)
    assert shape.weight_bytes == (64 + 64 + 96) * bytes_of_a_block


@pytest.mark.parametrize(("dtype", "layer_0", "head"), [("int4", 18, 34), ("int8", 34, 34)])
def test_stored_blocks_are_read_as_they_run(
    checkpoint: Path, dtype: str, layer_0: int, head: int
) -> None:
    """As the embedded model's: a layer in 4 bits, the head in 8."""
    blocks = {LAYER_0: np.zeros((64, 1, 18), np.uint8), EMBEDDING: np.zeros((96, 1, 34), np.uint8)}
    kinds = {LAYER_0: "q4_0", EMBEDDING: "q8_0"}
    save_file(blocks, checkpoint / GGUF_BLOCKS_FILE, metadata=kinds)
    made_anew = {"int4": 20, "int8": 34}[dtype]
    shape = ModelShape.of_checkpoint(checkpoint, dtype)
    assert shape.weight_bytes == 64 * layer_0 + 64 * made_anew + 96 * head


def test_an_own_head_is_read_in_place_of_the_embedding(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    head = np.zeros((160, 32), np.float32)
    save_file(tensors | {"lm_head.weight": head}, checkpoint / "model.safetensors")
    shape = ModelShape.of_checkpoint(checkpoint, "bf16")
    assert shape.head_weights == 160 * 32
    assert shape.weight_bytes == 2 * (2 * 64 * 32 + 160 * 32)


def test_attention_counts_each_pair_of_positions_once() -> None:
    shape = shape_of(layer_weights=0, head_weights=0, num_layers=1, attention_width=1)
    three_and_two = Workload("x", (Job(0, (1, 2, 3), 2),), concurrency=1)
    assert shape.flops(three_and_two) == 4 * (1 + 2 + 3 + 4)


def test_the_last_token_is_made_and_not_fed_back() -> None:
    shape = shape_of(layer_weights=100, head_weights=10, num_layers=0, attention_width=0)
    assert shape.flops(Workload("x", (Job(0, (1, 2, 3), 2),), 1)) == 2 * 100 * 4 + 2 * 10 * 2


def test_one_stream_is_bounded_by_reading() -> None:
    assert least_seconds(make_workload("W1", 0), SMOLLM2, "bf16", LIMITS) == pytest.approx(
        128 * 268_959_744 / 50e9
    )


def test_a_long_context_is_bounded_by_arithmetic() -> None:
    flops = 2 * 106_168_320 * 2048 + 2 * 28_311_552 + 4 * 30 * 576 * 2048 * 2049 // 2
    assert SMOLLM2.flops(make_workload("W5", 0)) == flops
    assert least_seconds(make_workload("W5", 0), SMOLLM2, "bf16", LIMITS) == flops / 450e9


def test_weights_may_be_multiplied_in_what_is_fastest() -> None:
    assert LIMITS.flops_for("fp32") == 150e9
    assert LIMITS.flops_for("bf16") == 450e9
    assert LIMITS.flops_for("int8") == LIMITS.flops_for("int4") == 800e9
    slow_int8 = Limits(read_bytes=1, fp32_flops=1, bf16_flops=9, int8_ops=3)
    assert slow_int8.flops_for("int8") == 9
    slow_bf16 = Limits(read_bytes=1, fp32_flops=9, bf16_flops=1, int8_ops=3)
    assert slow_bf16.flops_for("bf16") == slow_bf16.flops_for("int4") == 9


def test_a_reused_prefix_is_computed_once() -> None:
    shape = shape_of(layer_weights=1, head_weights=0, num_layers=0, attention_width=0)
    alone = shape.flops(make_workload("W4off", 0))
    shared = shape.flops(make_workload("W4", 0))
    assert alone - shared == 2 * 31 * 1024


def test_waiting_requests_need_iterations_of_their_own() -> None:
    jobs = tuple(Job(place, (1,), 10) for place in range(6))
    shape = shape_of(layer_weights=50, head_weights=0, num_layers=0, weight_bytes=100)
    slow_reads = Limits(read_bytes=100.0, fp32_flops=1e9, bf16_flops=1e9, int8_ops=1e9)
    assert least_seconds(Workload("x", jobs, 6), shape, "bf16", slow_reads) == 10
    assert least_seconds(Workload("x", jobs, 2), shape, "bf16", slow_reads) == 30
