"""The native attention in whole models: transformers' own logits in fp32; int8 KV storage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.model.accuracy import TextReader, deviation
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.factory import load_runner
from inflight.model.fused.load import build_fused_runner
from inflight.model.hf_runner import HfRunner
from inflight.model.loading import load_model
from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.packed_model import PackedModel
from inflight.model.probe import probe
from inflight.native.library import Isa, NativeLibrary
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
    runner = HfRunner(model, backend, PlainRuntime(model.device))
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


@pytest.mark.parametrize(
    ("values", "bytes_per_head"),
    [
        ({"runner": "fused"}, 16 * 4),
        ({"runner": "fused", "kv_cache_dtype": "bf16"}, 16 * 2),
        ({"runner": "fused", "kv_cache_dtype": "int8"}, 16 + 4),
        ({"kv_cache_dtype": "int8", "runner": "hf", "attention_backend": "cpu"}, 16 + 4),
        ({"kv_cache_dtype": "int8", "runner": "hf", "attention_backend": "torch"}, 16 + 4),
        ({"dtype": "fp16"}, 16 * 2),
        ({"dtype": "fp16", "kv_cache_dtype": "int8"}, 16 + 4),
    ],
    ids=str,
)
def test_the_key_kv_cache_dtype_says_what_is_stored(
    values: dict[str, object], bytes_per_head: int, tmp_path: Path
) -> None:
    config = InflightConfig.model_validate({"dtype": "fp32", "num_threads": 1} | values)
    runner = load_runner(tiny_checkpoint(tmp_path), config)
    assert runner.spec.kv_bytes_per_token == 3 * 2 * 2 * bytes_per_head  # layers, heads, K and V


def test_int8_of_the_native_kernels_is_int8_of_the_reference(tmp_path: Path) -> None:
    """Through whole models: the same logits, and not those of fp32 storage."""
    directory = tiny_checkpoint(tmp_path)
    tokens = np.random.default_rng(5).integers(3, VOCAB_SIZE, size=40)

    def logits(library: NativeLibrary | None, kv: str) -> npt.NDArray[np.float32]:
        config = InflightConfig(dtype="fp32", kv_cache_dtype=kv, max_num_tokens=64)  # type: ignore[arg-type]
        runner = build_fused_runner(directory, config, library)
        return TextReader(runner, window=64, tokens_per_block=16).logits(tokens.tolist())

    library = native_library()
    with library.limited_to(Isa.AVX2):  # queries stay fp32 there
        native, exact = logits(library, "int8"), logits(library, "fp32")
    reference = logits(None, "int8")
    assert np.abs(native - reference).max() < np.abs(native - exact).max() / 20
    assert 1e-4 < deviation(native, exact).error < 0.05
