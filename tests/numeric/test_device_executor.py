"""The device runner in the whole engine, on a CPU that stands in for the device: greedy tokens of
transformers, through pauses, tiers and a forward that runs out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvTiersConfig,
    Request,
    SchedulerConfig,
)
from inflight.api.config import InflightConfig
from inflight.errors import RequestFailedError
from inflight.executor import Executor
from inflight.model.device.load import load_device_runner
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.device.runner import DeviceRunner
from inflight.model.device.torch_ops import TorchOps
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint

pytestmark = pytest.mark.numeric

NUM_TOKENS = 24
SAFE_MARGIN = 1e-4
LENGTHS = (3, 17, 40, 33, 8, 25)
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, VOCAB_SIZE, size=length).tolist() for length in LENGTHS]
ENGINE = ExecutorConfig(
    max_batch_size=8,
    max_num_tokens=40,
    max_seq_len=96,
    kv_cache_config=KvCacheConfig(tokens_per_block=16, num_blocks=40),
)
HOST_BYTES = 1 << 22


def runner_of(directory: Path, **keys: Any) -> DeviceRunner:
    values = {
        "dtype": "fp32", "max_num_tokens": 40, "max_batch_size": 8, "max_seq_len": 96,
        "tokens_per_block": 16,
    }  # fmt: skip
    config = InflightConfig.model_validate(values | keys)
    return load_device_runner(directory, config, PlainRuntime(torch.device("cpu")))


def greedy(directory: Path) -> list[list[int]]:
    """transformers' tokens of each prompt, up to its first near-tie."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                best = model(torch.tensor([prompt + tokens])).logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) < SAFE_MARGIN:
                break
            tokens.append(int(best.indices[0]))
        answers.append(tokens)
    print(f"{sum(len(tokens) < NUM_TOKENS for tokens in answers)} near-ties")
    return answers


def check(executor: Executor, expected: list[list[int]]) -> None:
    outputs = executor.generate(PROMPTS, max_tokens=NUM_TOKENS)
    for output, wanted in zip(outputs, expected, strict=True):
        assert len(output.token_ids) == NUM_TOKENS
        assert list(output.token_ids[: len(wanted)]) == wanted


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "qwen2_moe"]
)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, model_type)
    expected = greedy(directory)
    for keys in ({}, {"cuda_graph_mode": False}):
        with Executor(runner_of(directory, **keys), ENGINE) as executor:
            check(executor, expected)


def test_tokens_stay_right_through_pauses_and_host_memory(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    expected = greedy(directory)
    crowded = replace(
        ENGINE,
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
        kv_cache_config=KvCacheConfig(
            tokens_per_block=16, num_blocks=9, tiers=KvTiersConfig(host_memory_bytes=HOST_BYTES)
        ),
    )
    runner = runner_of(directory, kv_cache_host_memory_bytes=HOST_BYTES)
    with Executor(runner, crowded) as executor:
        for _ in range(3):
            check(executor, expected)
        tiers = executor.kv_cache_stats().tiers
    assert tiers and tiers[0].offloaded_bytes > 0 and tiers[0].onboarded_bytes > 0


class RunsOutOnce(TorchOps):
    """Memory runs out in the first attention after ``is_full`` is set."""

    is_full = False

    def attend(self, *arguments: Any) -> torch.Tensor:
        if self.is_full:
            self.is_full = False
            raise torch.OutOfMemoryError("no memory")
        return super().attend(*arguments)


class FailingRuntime(PlainRuntime):
    """Like a card after a kernel has read what is not there: nothing works from then on."""

    has_failed = False

    def check(self) -> None:
        if self.has_failed:
            raise RuntimeError("an illegal memory access was encountered")


def test_a_device_that_fails_for_good_ends_the_engine(tmp_path: Path) -> None:
    runtime = FailingRuntime(torch.device("cpu"))
    config = InflightConfig(dtype="fp32", max_num_tokens=40, max_batch_size=8, max_seq_len=96,
                            tokens_per_block=16, cuda_graph_mode=False)  # fmt: skip
    runner = load_device_runner(tiny_checkpoint(tmp_path), config, runtime)
    ops = RunsOutOnce()
    runner.decoder.ops = ops
    with Executor(runner, ENGINE) as executor:
        ops.is_full = runtime.has_failed = True
        request = Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=NUM_TOKENS)
        (response,) = executor.await_responses(executor.enqueue_request(request), timeout=30)
        assert isinstance(response.error, RequestFailedError)
        with pytest.raises(RequestFailedError, match="the engine has stopped on an error"):
            executor.enqueue_request(request)
        assert not executor.is_healthy


def test_running_out_of_memory_ends_one_batch_and_the_engine_goes_on(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    expected = greedy(directory)
    runner = runner_of(directory, cuda_graph_mode=False)
    ops = RunsOutOnce()
    runner.decoder.ops = ops
    with Executor(runner, ENGINE) as executor:
        ops.is_full = True
        request = Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=NUM_TOKENS)
        request_id = executor.enqueue_request(request)
        (response,) = executor.await_responses(request_id, timeout=30)
        assert isinstance(response.error, RequestFailedError) and not ops.is_full
        assert executor.is_healthy
        check(executor, expected)
        stats = executor.kv_cache_stats()
        assert stats.used_num_blocks == 0
