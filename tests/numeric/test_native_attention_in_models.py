"""transformers' classes with the native attention give transformers' own logits, in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.model.hf_runner import HfRunner
from inflight.model.loading import load_model
from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.packed_model import PackedModel
from inflight.model.probe import probe
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.native_library import native_library
from tests.numeric.packed_driver import (
    logits_of_all_rows,
    request_of,
    shuffled_block_tables,
    staggered_plans,
)

pytestmark = pytest.mark.numeric

LENGTHS = (40, 17, 9, 33)
PROMPT_LENGTHS = (35, 9, 4, 20)
TOKENS_PER_BLOCK = 16


# Plain; windows and soft-cap; sinks; one KV head; heads that are normed.
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "gpt_bigcode", "qwen3"])
def test_packed_equals_plain(model_type: str, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, model_type)
    model = PackedModel(load_model(directory, dtype=torch.float32, device=torch.device("cpu")))
    probe(model, NativeAttentionBackend(native_library(), torch.float32))
    backend = NativeAttentionBackend(native_library(), torch.float32)
    runner = HfRunner(model, backend)
    runner.allocate_kv_cache(12, TOKENS_PER_BLOCK)
    backend.storage.fill_(torch.nan)
    rng = np.random.default_rng(4)
    sequences = [rng.integers(3, VOCAB_SIZE, size=length) for length in LENGTHS]
    logits = logits_of_all_rows(
        runner,
        staggered_plans(
            [request_of(i, tokens) for i, tokens in enumerate(sequences)],
            PROMPT_LENGTHS,
            chunk=11,
            most_context_tokens=20,
        ),
        shuffled_block_tables(LENGTHS, TOKENS_PER_BLOCK, 12, seed=3),
        TOKENS_PER_BLOCK,
    )
    for i, tokens in enumerate(sequences):
        plain = model.plain_logits(torch.from_numpy(tokens)[None])[0].numpy()
        got = np.stack([logits[i, position] for position in range(len(tokens))])
        np.testing.assert_allclose(got, plain, atol=1e-4)
