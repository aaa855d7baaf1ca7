"""The fused runner's packed, chunked and mixed logits equal transformers' plain forward, for every
model type that it knows and every fact of a DecoderSpec, natively and in torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.model.fused.families import FUSED_MODEL_TYPES
from inflight.model.fused.load import build_fused_runner
from inflight.model.fused.reference_ops import ReferenceAttention
from inflight.model.fused.runner import FusedRunner
from inflight.native.attention import NativeAttention
from tests.fakes.tiny_models import (
    PROVED_CONFIGS,
    VOCAB_SIZE,
    save_tiny_checkpoint,
    tiny_config,
)
from tests.numeric.decoder_cases import CASES, packed_logits, plain_logits, random_sequences
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric

FP32 = InflightConfig(dtype="fp32", num_threads=1)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a case, made once."""

    @cache
    def make(case: str) -> Path:
        model_type, changes = CASES[case]
        return save_tiny_checkpoint(
            tmp_path_factory.mktemp("tiny"), tiny_config(model_type, **changes)
        )

    return make


def fused_logits(
    runner: FusedRunner, sequences: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float32]:
    return packed_logits(runner, sequences, lambda value: fill_storage(runner, value))


def fill_storage(runner: FusedRunner, value: float) -> None:
    attention = runner.decoder.ops.attention
    if isinstance(attention, NativeAttention):
        attention.storage.fill_(value)
    else:
        assert isinstance(attention, ReferenceAttention)
        for tensors in attention.storage:
            for tensor in tensors:
                tensor.fill_(value)


def test_every_known_model_type_is_one_that_the_hf_runner_proves() -> None:
    assert set(PROVED_CONFIGS) >= FUSED_MODEL_TYPES


@pytest.mark.parametrize("ops", ["native", "torch"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_packed_equals_plain(case: str, ops: str, checkpoint_of: Any) -> None:
    directory = checkpoint_of(case)
    library = native_library() if ops == "native" else None
    sequences = random_sequences()
    expected = plain_logits(directory, sequences)
    got = fused_logits(build_fused_runner(directory, FP32, library), sequences)
    assert got.dtype == np.float32 and got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE


@pytest.mark.parametrize("case", sorted(CASES))
def test_context_matters_in_what_is_compared(case: str, checkpoint_of: Any) -> None:
    """Another token 6 places back changes the last row by far more than the tolerance."""
    directory = checkpoint_of(case)
    tokens = random_sequences()[0]
    other = tokens.copy()
    other[-7] = (other[-7] + 100) % VOCAB_SIZE
    before, after = (plain_logits(directory, [s])[-1] for s in (tokens, other))
    assert np.abs(after - before).max() > 30 * TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "qwen2",
        "gemma2",
        "olmo2",
        "granite with multipliers",
        "cohere",
        "gpt_neox",
        "phi",
        "starcoder2",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
    ],
)
def test_bf16_is_nearer_to_fp32_than_transformers_bf16(case: str, checkpoint_of: Any) -> None:
    directory = checkpoint_of(case)
    sequences = random_sequences()
    exact = plain_logits(directory, sequences)
    theirs = plain_logits(directory, sequences, torch.bfloat16)
    runner = build_fused_runner(directory, InflightConfig(dtype="bf16"), native_library())
    ours = fused_logits(runner, sequences)
    # Of the middle row: where two experts' logits are close, rounding decides which one runs, and
    # the few rows that get another one differ by more than by rounding, in either model.
    our_error, their_error = (
        np.median(np.sqrt(np.mean((x - exact) ** 2, axis=1))) for x in (ours, theirs)
    )
    print(f"{case}: bf16 logits off by {our_error:.4f}, transformers' by {their_error:.4f}")
    assert 0 < our_error < their_error
