"""The fused runner on the embedded model: greedy tokens of transformers' generate in fp32 (from its
built engine), and how far the lower precisions are from fp32 logits, beside transformers' own bf16.

Equal tokens are promised for equal logits: a position where the reference's two best logits are
closer than SAFE_MARGIN ends that prompt's comparison; how many is printed.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    KvCacheConfig,
    SchedulerConfig,
)
from inflight.api.config import InflightConfig
from inflight.checkpoint import prepare_checkpoint
from inflight.executor import Executor
from inflight.model.accuracy import TextReader, deviation
from inflight.model.factory import load_runner
from inflight.model.fused.load import build_fused_runner
from inflight.native.packed import WeightKind
from inflight.text.tokenizer import Tokenizer
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric

SAFE_MARGIN = 1e-4
LENGTHS = (5, 16, 33, 70)
PROMPTS_OF_A_LENGTH = 4
NUM_TOKENS = 48
TEXT_LENGTH = 256


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_checkpoint("", "", progress=print).directory


@pytest.fixture(scope="module")
def text_ids(directory: Path) -> list[int]:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[key] for key in sorted(topics))
    return Tokenizer.from_directory(directory).encode(text[:20_000])


def load_plain(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def greedy(model: Any, prompts: list[list[int]]) -> Iterator[list[int]]:
    """transformers.generate on prompts of one length, each answer up to its first near-tie."""
    output = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.scores, dim=1).topk(2).values
    is_safe = (best[..., 0] - best[..., 1] >= SAFE_MARGIN).int()
    for row, prompt in enumerate(prompts):
        num_safe = int(is_safe[row].cumprod(0).sum())
        yield output.sequences[row, len(prompt) :][:num_safe].tolist()


SQUEEZED = ExecutorConfig(
    max_batch_size=16,
    max_num_tokens=48,
    max_seq_len=128,
    scheduler_config=SchedulerConfig(
        capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
        context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS,
    ),
    kv_cache_config=KvCacheConfig(tokens_per_block=16, num_blocks=26),
)
"""Small chunks beside generations, and a pool that forces pauses."""


def test_greedy_tokens_are_those_of_transformers(directory: Path, text_ids: list[int]) -> None:
    starts = range(0, 120 * PROMPTS_OF_A_LENGTH, 120)
    prompts = [[text_ids[start : start + n] for start in starts] for n in LENGTHS]
    model = load_plain(directory, torch.float32)
    expected = [tokens for same_length in prompts for tokens in greedy(model, same_length)]
    print(f"{sum(len(tokens) < NUM_TOKENS for tokens in expected)} of {len(expected)} near ties")
    native_library()
    runner = load_runner(directory, InflightConfig(dtype="fp32", runner="fused", max_seq_len=128))
    with Executor(runner, SQUEEZED) as executor:
        asked = [tuple(prompt) for same_length in prompts for prompt in same_length]
        outputs = executor.generate(asked, max_tokens=NUM_TOKENS)
        pauses = sum(
            stats.inflight_batching_stats.num_paused_requests
            for stats in executor.get_latest_iteration_stats()
        )
    assert pauses > 0, "the pool was meant to be too small"
    for output, tokens in zip(outputs, expected, strict=True):
        assert len(output.token_ids) == NUM_TOKENS
        assert list(output.token_ids[: len(tokens)]) == tokens


def fused_logits(
    directory: Path, ids: list[int], dtype: Any, kind: WeightKind | None = None
) -> npt.NDArray[np.float32]:
    """float32[n, vocab_size] of all positions, computed as one context."""
    config = InflightConfig(dtype=dtype)
    runner = build_fused_runner(directory, config, native_library(), weight_kind=kind)
    return TextReader(runner, window=TEXT_LENGTH, tokens_per_block=32).logits(ids)


def test_how_far_lower_precisions_are_from_fp32(directory: Path, text_ids: list[int]) -> None:
    ids = text_ids[1000 : 1000 + TEXT_LENGTH]

    def plain(dtype: torch.dtype) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return load_plain(directory, dtype)(torch.tensor([ids])).logits[0].float().numpy()

    exact = plain(torch.float32)

    def error(name: str, logits: npt.NDArray[np.float32]) -> float:
        found = deviation(logits, exact)
        print(
            f"{name}: error {found.error:.5f} of the spread, the same best token in "
            f"{found.agreement:.1%}"
        )
        return found.error

    theirs = error("transformers bf16", plain(torch.bfloat16))
    assert error("fused fp32", fused_logits(directory, ids, "fp32")) < 1e-5
    assert error("fused bf16", fused_logits(directory, ids, "bf16")) < theirs
    assert error("fused q8_0", fused_logits(directory, ids, "bf16", "q8_0")) < 0.1
    assert error("fused q4_1", fused_logits(directory, ids, "bf16", "q4_1")) < 0.2
