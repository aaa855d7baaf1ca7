"""Greedy tokens of the embedded model, packed and in flight, equal transformers' own `generate`.

Both in fp32. A position where the reference's two best logits are closer than SAFE_MARGIN ends that
prompt's comparison (equal tokens are promised for equal logits); how many is printed.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    KvCacheConfig,
    SamplingConfig,
    SchedulerConfig,
)
from inflight.api.config import InflightConfig
from inflight.checkpoint import Checkpoint, prepare_checkpoint
from inflight.executor import Executor
from inflight.model.factory import load_runner
from inflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.numeric

SAFE_MARGIN = 1e-4
LENGTHS = (3, 8, 16, 17, 31, 40, 64, 90)
PROMPTS_OF_A_LENGTH = 8
NUM_TOKENS = 64


@dataclass(frozen=True)
class Expected:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Up to the first near-tie, at most NUM_TOKENS."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return prepare_checkpoint("", "", progress=print)


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[Expected]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    ids = Tokenizer.from_directory(checkpoint.directory).encode(text[:40_000])
    found = []
    for place, length in enumerate(LENGTHS):
        starts = [(place * PROMPTS_OF_A_LENGTH + i) * 120 for i in range(PROMPTS_OF_A_LENGTH)]
        found += reference(model, [ids[start : start + length] for start in starts])
    near_ties = sum(len(e.tokens) < NUM_TOKENS for e in found)
    print(f"{len(found)} prompts, {near_ties} with a near-tie in {NUM_TOKENS} tokens")
    return found


def reference(model: torch.nn.Module, prompts: list[list[int]]) -> Iterator[Expected]:
    """transformers.generate on prompts of one length, so nothing is padded."""
    output = model.generate(  # type: ignore[operator]
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        pad_token_id=0,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for row, prompt in enumerate(prompts):
        tokens = output.sequences[row, len(prompt) :].tolist()
        for step, scores in enumerate(output.scores):
            best = scores[row].topk(2).values
            if float(best[0] - best[1]) < SAFE_MARGIN:
                tokens = tokens[:step]
                break
        yield Expected(tuple(prompt), tuple(tokens))


BASE = ExecutorConfig(
    max_batch_size=64,
    max_num_tokens=512,
    max_seq_len=256,
    kv_cache_config=KvCacheConfig(tokens_per_block=32, num_blocks=600),
)


def config(
    policy: str,
    *,
    chunking: str = "first_come_first_served",
    max_num_tokens: int = 512,
    tokens_per_block: int = 32,
    num_blocks: int = 600,
    max_batch_size: int = 64,
) -> ExecutorConfig:
    return replace(
        BASE,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy(policy),
            context_chunking_policy=ContextChunkingPolicy(chunking),
        ),
        kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block, num_blocks=num_blocks),
    )


def run(
    checkpoint: Checkpoint,
    settings: InflightConfig,
    executor_config: ExecutorConfig,
    asked: list[Expected],
) -> tuple[list[tuple[int, ...]], int]:
    """What the engine answers, and how many pauses there were."""
    runner = load_runner(checkpoint.directory, settings)
    with Executor(runner, executor_config, end_ids=checkpoint.end_ids) as executor:
        outputs = executor.generate(
            [e.prompt for e in asked],
            max_tokens=NUM_TOKENS,
            sampling_config=SamplingConfig(min_tokens=NUM_TOKENS),
        )
        pauses = sum(
            stats.inflight_batching_stats.num_paused_requests
            for stats in executor.get_latest_iteration_stats()
        )
    return [output.token_ids for output in outputs], pauses


def check(got: list[tuple[int, ...]], asked: list[Expected]) -> None:
    for tokens, wanted in zip(got, asked, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert tokens[: len(wanted.tokens)] == wanted.tokens


RUNNERS = pytest.mark.parametrize(
    "settings",
    [
        InflightConfig(dtype="fp32", runner="fused"),
        InflightConfig(dtype="fp32", runner="hf", attention_backend="torch"),
    ],
    ids=["fused", "hf, torch attention"],
)


@RUNNERS
def test_all_prompts_in_one_batch(
    checkpoint: Checkpoint, expected: list[Expected], settings: InflightConfig
) -> None:
    got, _ = run(checkpoint, settings, config("guaranteed_no_evict"), expected)
    check(got, expected)


@RUNNERS
def test_all_prompts_with_a_pool_that_forces_pauses(
    checkpoint: Checkpoint, expected: list[Expected], settings: InflightConfig
) -> None:
    squeezed = config(
        "max_utilization",
        chunking="equal_progress",
        max_num_tokens=96,
        tokens_per_block=16,
        num_blocks=90,
    )
    got, pauses = run(checkpoint, settings, squeezed, expected)
    assert pauses > 0, "the pool was meant to be too small"
    print(f"{pauses} pauses")
    check(got, expected)


@pytest.mark.parametrize(
    "executor_config",
    [
        config("static_batch", max_batch_size=5),
        config("guaranteed_no_evict", max_num_tokens=81, tokens_per_block=16),
        config("guaranteed_no_evict", tokens_per_block=64, max_batch_size=3),
        config("max_utilization", tokens_per_block=128, num_blocks=16, max_num_tokens=200),
    ],
    ids=["static", "small chunks", "block 64", "block 128"],
)
@RUNNERS
def test_some_prompts_in_other_company(
    checkpoint: Checkpoint,
    expected: list[Expected],
    settings: InflightConfig,
    executor_config: ExecutorConfig,
) -> None:
    some = expected[::6]
    got, _ = run(checkpoint, settings, executor_config, some)
    check(got, some)
