"""FusedRunner as the engine meets it: sampling rows, faults, copied blocks, quantized weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.errors import ConfigError, ForwardError
from inflight.model.fused.load import build_fused_runner, load_fused_runner
from inflight.model.fused.runner import FusedRunner
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs
from inflight.native.gguf_blocks import QuantizedKind
from inflight.native.quantize import quantize
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.native_library import native_library
from tests.numeric.packed_driver import request_of

pytestmark = pytest.mark.numeric

FP32 = InflightConfig(dtype="fp32", max_num_tokens=64)
TOKENS = np.random.default_rng(2).integers(3, VOCAB_SIZE, size=40)
TABLE = np.array([6, 1, 4], dtype=np.int32)
TOKENS_PER_BLOCK = 16
NEVER_QUANTIZED = ("embed_tokens", "mlp.gate.", "shared_expert_gate")
"""Parts of their names."""


@pytest.fixture(params=["native", "torch"])
def library(request: pytest.FixtureRequest) -> Any:
    return native_library() if request.param == "native" else None


def tiny_runner(directory: Path, library: Any, model_type: str = "llama") -> FusedRunner:
    runner = build_fused_runner(tiny_checkpoint(directory, model_type), FP32, library)
    runner.allocate_kv_cache(8, TOKENS_PER_BLOCK)
    return runner


def packed_context(start: int, end: int) -> PackedInputs:
    packer = Packer(
        max_num_tokens=64,
        max_batch_size=2,
        max_blocks_per_sequence=3,
        tokens_per_block=TOKENS_PER_BLOCK,
    )
    part = ScheduledChunk(request_of(0, TOKENS), Phase.CONTEXT, start, end - start, True)
    return packer.pack(ScheduledBatch(0, context=(part,)), lambda request_id: TABLE)


def every_row(inputs: PackedInputs) -> PackedInputs:
    return replace(inputs, logits_indices=np.arange(len(inputs.token_ids)))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "phi", "qwen2_moe"])
def test_only_the_rows_asked_for_come_back(model_type: str, library: Any, tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path, library, model_type)
    inputs = packed_context(0, 20)
    every = runner.forward(every_row(inputs)).logits
    some = runner.forward(replace(inputs, logits_indices=np.array([3, 11]))).logits
    none = runner.forward(replace(inputs, logits_indices=np.arange(0))).logits
    assert every.shape == (20, VOCAB_SIZE) and none.shape == (0, VOCAB_SIZE)
    assert some.dtype == np.float32 and some.flags.c_contiguous and some.flags.writeable
    np.testing.assert_allclose(some, every[[3, 11]], atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen2_moe"])
def test_without_logits_the_likeliest_ids_come_back(
    model_type: str, library: Any, tmp_path: Path
) -> None:
    runner = tiny_runner(tmp_path, library, model_type)
    inputs = every_row(packed_context(0, 20))
    logits = runner.forward(inputs).logits
    output = runner.forward(replace(inputs, need_logits=False))
    assert output.logits is None and output.likeliest is not None
    assert output.likeliest.dtype == np.int32
    np.testing.assert_array_equal(output.likeliest, logits.argmax(axis=1))


def test_logits_come_back_where_they_alone_can_tell(library: Any, tmp_path: Path) -> None:
    """Soft-capped ones may be equal; rows that are not finite are the sampler's to judge."""
    capped = tiny_runner(tmp_path / "capped", library, "gemma2")
    assert capped.decoder.spec.logits_softcap is not None
    inputs = replace(packed_context(0, 5), need_logits=False)
    assert capped.forward(inputs).likeliest is None
    broken = tiny_runner(tmp_path / "broken", library)
    norm = broken.decoder.weights.norm
    assert norm is not None
    norm.weight[3] = float("nan")
    output = broken.forward(inputs)
    assert output.likeliest is None and output.logits is not None
    assert np.isnan(output.logits).all()


def test_rows_that_do_not_sample_are_there_for_later_ones(library: Any, tmp_path: Path) -> None:
    expected = tiny_runner(tmp_path, library).forward(packed_context(0, 40)).logits
    runner = tiny_runner(tmp_path, library)
    for start, end in ((0, 25), (25, 39)):
        runner.forward(replace(packed_context(start, end), logits_indices=np.arange(0)))
    np.testing.assert_allclose(runner.forward(packed_context(39, 40)).logits, expected, atol=1e-5)


def test_logits_stay_what_they_are_when_the_next_iteration_runs(
    library: Any, tmp_path: Path
) -> None:
    runner = tiny_runner(tmp_path, library)
    logits = runner.forward(packed_context(0, 12)).logits
    before = logits.copy()
    runner.forward(packed_context(12, 20))
    np.testing.assert_array_equal(logits, before)


def test_a_failing_forward_is_a_batch_error_and_the_next_one_works(
    library: Any, tmp_path: Path
) -> None:
    runner = tiny_runner(tmp_path, library)
    inputs = packed_context(0, 12)
    expected = runner.forward(inputs).logits
    bad = replace(inputs, token_ids=np.full(12, VOCAB_SIZE + 5))
    with pytest.raises(ForwardError, match="forward pass of 12 rows failed: IndexError") as caught:
        runner.forward(bad)
    assert isinstance(caught.value.__cause__, IndexError)
    np.testing.assert_array_equal(runner.forward(inputs).logits, expected)


def test_a_sequence_goes_on_in_copied_blocks(library: Any, tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path, library)
    runner.forward(packed_context(0, 21))
    expected = runner.forward(packed_context(21, 23)).logits
    runner.forward(packed_context(0, 21))
    # The half-filled second block (1) is copied to block 5, which takes its place in the table.
    runner.copy_blocks(np.array([1], dtype=np.int32), np.array([5], dtype=np.int32))
    inputs = packed_context(21, 23)
    table = inputs.block_tables.copy()
    table[0, 1] = 5
    slots = 5 * TOKENS_PER_BLOCK + np.array([21, 22]) % TOKENS_PER_BLOCK
    got = runner.forward(replace(inputs, block_tables=table, slot_mapping=slots)).logits
    np.testing.assert_array_equal(got, expected)


def test_native_block_sizes_are_declared(tmp_path: Path) -> None:
    runner = build_fused_runner(tiny_checkpoint(tmp_path), FP32, native_library())
    assert runner.spec.supported_tokens_per_block == (16, 32, 64, 128)
    with pytest.raises(ConfigError, match="tokens_per_block: 8 must be one of 16, 32, 64, 128"):
        runner.allocate_kv_cache(4, 8)
    runner.allocate_kv_cache(4, 128)


def test_the_spec_says_what_was_loaded(tmp_path: Path) -> None:
    spec = load_fused_runner(tiny_checkpoint(tmp_path), FP32).spec
    assert (spec.vocab_size, spec.num_layers, spec.max_position_embeddings) == (VOCAB_SIZE, 3, 128)
    assert (spec.dtype, spec.device) == ("fp32", "cpu")
    assert spec.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, fp32


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("llama", "q8_0"),
        ("llama", "q4_0"),
        ("llama", "q4_1"),
        ("phi", "q8_0"),
        ("qwen2_moe", "q8_0"),
        ("qwen3_moe", "q4_1"),
    ],
)
def test_quantized_weights_count_as_what_they_were_rounded_to(
    model_type: str, kind: QuantizedKind, library: Any, tmp_path: Path
) -> None:
    """Against the same numbers as fp32 weights: what is left is how activations are rounded."""
    directory = tiny_checkpoint(tmp_path, model_type)
    quantized = build_fused_runner(directory, FP32, library, weight_kind=kind)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in NEVER_QUANTIZED):
            tensors[name] = quantize(tensor, kind).dequantize().contiguous()
    save_file(tensors, file)
    rounded = build_fused_runner(directory, FP32, library)
    got, expected = (all_logits(runner) for runner in (quantized, rounded))
    # Of the middle row: the few whose experts are others after rounding differ by more than that.
    errors = np.sqrt(np.mean((got - expected) ** 2, axis=1)) / expected.std()
    error = float(np.median(errors))
    print(f"{model_type} {kind}: {error:.4f}")
    assert 1e-4 < error < 0.04


def all_logits(runner: FusedRunner) -> npt.NDArray[np.float32]:
    runner.allocate_kv_cache(8, TOKENS_PER_BLOCK)
    return runner.forward(every_row(packed_context(0, 40))).logits
