"""The device runner's packed, chunked and mixed logits equal transformers' plain forward, on a CPU
that stands in for the device, with the operations written in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.errors import ConfigError
from inflight.model.device.load import load_device_runner
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.device.runner import DeviceRunner
from inflight.model.dtypes import DTYPES
from inflight.model.fused.families import decoder_spec
from tests.fakes.tiny_models import save_tiny_checkpoint, tiny_config
from tests.numeric.decoder_cases import (
    CASES,
    TOKENS_PER_BLOCK,
    packed_logits,
    plain_logits,
    random_sequences,
)

pytestmark = pytest.mark.numeric

TOLERANCE = 1e-4


def checkpoint(directory: Path, case: str) -> Path:
    model_type, changes = CASES[case]
    return save_tiny_checkpoint(directory, tiny_config(model_type, **changes))


def runner_of(directory: Path, dtype: str = "fp32", **keys: object) -> DeviceRunner:
    values = {"dtype": dtype, "max_num_tokens": 64, "max_batch_size": 8}
    config = InflightConfig.model_validate(values | {"tokens_per_block": TOKENS_PER_BLOCK} | keys)
    return load_device_runner(directory, config, PlainRuntime(torch.device("cpu")))


def logits_of(runner: DeviceRunner) -> np.ndarray:
    def fill(value: float) -> None:
        with torch.inference_mode():
            runner.kv_cache.storage.fill_(value)

    return packed_logits(runner, random_sequences(), fill)


@pytest.mark.parametrize("case", sorted(CASES))
def test_packed_equals_plain(case: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, case)
    got = logits_of(runner_of(directory))
    expected = plain_logits(directory, random_sequences())
    assert got.dtype == np.float32 and got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE


@pytest.mark.parametrize(
    "case", ["llama", "qwen2", "gemma2", "olmo2", "phi", "cohere", "qwen2_moe"]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_nearer_to_fp32_than_transformers(
    dtype: str, case: str, tmp_path: Path
) -> None:
    directory = checkpoint(tmp_path, case)
    sequences = random_sequences()
    exact = plain_logits(directory, sequences)
    theirs = plain_logits(directory, sequences, DTYPES[dtype])
    ours = logits_of(runner_of(directory, dtype))
    our_error, their_error = (float(np.abs(x - exact).mean()) for x in (ours, theirs))
    print(f"{case}: {dtype} logits off by {our_error:.4f}, transformers' by {their_error:.4f}")
    assert 0 < our_error < 1.05 * their_error


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("llama", 0.25), ("llama with biases", 0.25), ("gemma2", 0.25),
        # Some rows go to other experts.
        ("mixtral", 0.4), ("qwen2_moe", 0.4),
    ],
)  # fmt: skip
def test_fp8_costs_what_rounding_to_three_bits_does(case: str, most: float, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, case)
    exact, rounded = logits_of(runner_of(directory, "bf16")), logits_of(runner_of(directory, "fp8"))
    error = float(np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std())
    print(f"{case}: {error:.4f}")
    assert 0.01 < error < most


def test_experts_in_fp8_are_their_numbers_times_the_scale_of_their_row(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "qwen2_moe")
    exact, rounded = (
        runner_of(directory, dtype).decoder.weights.layers[1].experts for dtype in ("bf16", "fp8")
    )
    assert exact is not None and rounded is not None
    for of_name, numbers, scales in (
        ("gate_ups", rounded.tensors.gate_ups, rounded.tensors.gate_up_scales),
        ("downs", rounded.tensors.downs, rounded.tensors.down_scales),
    ):
        weight = getattr(exact.tensors, of_name).float()
        assert numbers.dtype is torch.float8_e4m3fn and scales is not None
        assert scales.shape == weight.shape[:2]
        back = numbers.float() * scales[..., None]
        largest = weight.abs().amax(-1, keepdim=True)
        assert bool(((back - weight).abs() <= 2.0**-4 * weight.abs() + 1e-3 * largest).all())
    assert torch.equal(exact.router.weight, rounded.router.weight)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"dtype": "int8"}, "dtype int8 is computed on a CPU only"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 is stored on a CPU only"),
        ({"attention_backend": "cpu"}, "attention_backend is cpu"),
        ({"tokens_per_block": 8}, "do not take tokens_per_block 8"),
    ],
)
def test_what_no_device_computes_is_refused_by_key(
    keys: dict[str, object], reason: str, tmp_path: Path
) -> None:
    directory = checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=reason):
        runner_of(directory, **keys)


def test_the_spec_says_what_was_loaded(tmp_path: Path) -> None:
    spec = runner_of(checkpoint(tmp_path, "llama"), "bf16", kv_cache_dtype="fp16").spec
    config = decoder_spec(tiny_config("llama"))
    assert (spec.vocab_size, spec.num_layers) == (config.vocab_size, len(config.layers))
    assert (spec.dtype, spec.device, spec.kv_memory_bytes) == ("bf16", "cpu", None)
    assert spec.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2  # layers, K and V, heads, size, fp16
    assert spec.supported_tokens_per_block == (16, 32, 64, 128)
