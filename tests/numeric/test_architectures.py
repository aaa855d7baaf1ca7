"""Packed, chunked and mixed logits equal transformers' plain forward, for every architecture we
name; the ones that would be silently wrong are refused at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError
from inflight.model.architectures import PROVED, REFUSED
from inflight.model.factory import load_runner
from inflight.model.torch_attention import TorchAttention
from tests.fakes.tiny_models import (
    PROVED_CONFIGS,
    VOCAB_SIZE,
    save_tiny_checkpoint,
    tiny_checkpoint,
    tiny_config,
)
from tests.numeric.packed_driver import (
    logits_of_all_rows,
    request_of,
    shuffled_block_tables,
    staggered_plans,
)

pytestmark = pytest.mark.numeric

FP32 = InflightConfig(dtype="fp32", num_threads=1, runner="hf", attention_backend="torch")
LENGTHS = (22, 17, 9, 14)
PROMPT_LENGTHS = (15, 9, 4, 11)
NUM_BLOCKS = 40
TOLERANCE = 1e-4


def plain_logits(directory: Path, token_ids: np.ndarray[Any, Any]) -> torch.Tensor:
    """transformers alone, on one sequence: [n, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.inference_mode():
        return torch.cat(
            [model(torch.from_numpy(row)[None], use_cache=False).logits[0] for row in token_ids]
        )


def test_every_architecture_that_is_promised_is_tested_here() -> None:
    assert set(PROVED_CONFIGS) == PROVED


@pytest.mark.parametrize("model_type", sorted(PROVED_CONFIGS))
def test_packed_equals_plain(model_type: str, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, model_type)
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, VOCAB_SIZE, size=length) for length in LENGTHS]
    expected = plain_logits(directory, sequences).numpy()

    tokens_per_block = 4
    runner = load_runner(directory, FP32)
    runner.allocate_kv_cache(NUM_BLOCKS, tokens_per_block)
    assert isinstance(runner.backend, TorchAttention)
    for keys, values in runner.backend.storage:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    logits = logits_of_all_rows(
        runner,
        staggered_plans(
            [request_of(i, tokens) for i, tokens in enumerate(sequences)],
            PROMPT_LENGTHS,
            chunk=6,
            most_context_tokens=10,
        ),
        shuffled_block_tables(LENGTHS, tokens_per_block, NUM_BLOCKS, seed=3),
        tokens_per_block,
    )

    assert len(logits) == sum(LENGTHS)
    got = np.stack([logits[key] for key in sorted(logits)])
    assert got.dtype == np.float32 and got.shape == (sum(LENGTHS), runner.spec.vocab_size)
    assert np.abs(got - expected).max() <= TOLERANCE
    assert_context_matters(directory, sequences[2], expected[sum(LENGTHS[:3]) - 1])


def assert_context_matters(
    directory: Path, tokens: np.ndarray[Any, Any], last_row: np.ndarray[Any, Any]
) -> None:
    """Another first token changes the last row by far more than the tolerance: equality says
    something about attention and not only about the rest of the model."""
    other = tokens.copy()
    other[0] = (other[0] + 100) % VOCAB_SIZE
    changed = plain_logits(directory, [other]).numpy()[-1]
    assert np.abs(changed - last_row).max() > 30 * TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "gpt_bigcode", "gemma2"])
@pytest.mark.parametrize("tokens_per_block", [1, 16, 32])
def test_block_size_changes_nothing(model_type: str, tokens_per_block: int, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, model_type)
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, size=40)
    runner = load_runner(directory, FP32)
    runner.allocate_kv_cache(64, tokens_per_block)
    logits = logits_of_all_rows(
        runner,
        staggered_plans([request_of(0, tokens)], [33], chunk=13, most_context_tokens=13),
        shuffled_block_tables([40], tokens_per_block, 64, seed=5),
        tokens_per_block,
    )
    got = np.stack([logits[0, position] for position in range(40)])
    assert np.abs(got - plain_logits(directory, [tokens]).numpy()).max() <= TOLERANCE


REFUSED_CONFIGS = {
    "bloom": (tiny_config("bloom"), "attention interface"),
    "falcon": (tiny_config("falcon"), "attention interface"),
    "mpt": (tiny_config("mpt"), "attention interface"),
    "llama4_text": (tiny_config("llama4_text"), "chunked attention"),
    "qwen3_next": (tiny_config("qwen3_next"), "recurrent state"),
    "qwen3_5_text": (tiny_config("qwen3_5_text"), "recurrent state"),
    "mamba": (tiny_config("mamba"), "recurrent state"),
    "t5": (tiny_config("t5"), "encoder-decoder"),
    "llava": (tiny_config("llava"), "multimodal"),
    "lfm2": (tiny_config("lfm2", layer_types=["conv", "full_attention", "conv"]), "type conv"),
    "phi3": (
        tiny_config(
            "phi3",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
        ),
        "longest position in the batch",
    ),
    "llama": (
        tiny_config(
            "llama",
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "longest position in the batch",
    ),
}


@pytest.mark.parametrize("model_type", sorted(REFUSED_CONFIGS))
def test_what_would_be_wrong_is_refused_by_name_before_weights_are_read(
    model_type: str, tmp_path: Path
) -> None:
    config, reason = REFUSED_CONFIGS[model_type]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"architecture {model_type} .*{reason}"):
        load_runner(tmp_path, FP32)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="architecture llama .*quantised"):
        load_runner(tmp_path, FP32)


def test_an_unlisted_model_that_bypasses_the_interface_is_found_out(tmp_path: Path) -> None:
    config = tiny_config("gpt_neo", attention_types=[[["global", "local", "global"], 1]])
    assert config.model_type not in REFUSED
    save_tiny_checkpoint(tmp_path, config)
    with pytest.raises(CheckpointError, match="architecture gpt_neo .*attention interface"):
        load_runner(tmp_path, FP32)


def test_rope_that_does_not_depend_on_the_batch_is_served(tmp_path: Path) -> None:
    config = tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    )
    runner = load_runner(save_tiny_checkpoint(tmp_path, config), FP32)
    assert runner.spec.max_position_embeddings == 128
