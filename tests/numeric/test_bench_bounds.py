"""What the comparison's bounds count is what the engine computes with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inflight.api.config import InflightConfig
from inflight.model.fused.load import load_fused_runner
from tests.benchmarks.compare.bounds import ModelShape
from tests.benchmarks.fused_speed import shape_of

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_a_checkpoint_and_its_runner_have_one_shape(
    tmp_path: Path, dtype: str, is_tied: bool
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    runner = load_fused_runner(tmp_path, InflightConfig(dtype=dtype, max_num_tokens=64))
    assert ModelShape.of_checkpoint(tmp_path, dtype) == shape_of(runner)
