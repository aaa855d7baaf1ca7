"""HfRunner as the engine meets it: sampling rows, faults, copied blocks, several in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.errors import ConfigError, ForwardError
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.factory import load_runner
from inflight.model.hf_runner import HfRunner
from inflight.model.loading import load_model
from inflight.model.packed_model import PackedModel
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner, PackedInputs
from inflight.model.torch_attention import TorchAttention
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.packed_driver import logits_of_all_rows, request_of, staggered_plans

pytestmark = pytest.mark.numeric

FP32 = InflightConfig(dtype="fp32", num_threads=1, runner="hf", attention_backend="torch")
TOKENS = np.random.default_rng(2).integers(3, VOCAB_SIZE, size=20)
TABLE = np.array([6, 1, 4, 0, 7], dtype=np.int32)


def tiny_runner(directory: Path, *, model_type: str = "llama", seed: int = 0) -> ModelRunner:
    runner = load_runner(tiny_checkpoint(directory, model_type, seed=seed), FP32)
    runner.allocate_kv_cache(8, 4)
    return runner


def packed_context(start: int, end: int, *, samples: bool = True) -> PackedInputs:
    packer = Packer(
        max_num_tokens=32, max_batch_size=2, max_blocks_per_sequence=8, tokens_per_block=4
    )
    part = ScheduledChunk(request_of(0, TOKENS), Phase.CONTEXT, start, end - start, samples)
    return packer.pack(ScheduledBatch(0, context=(part,)), lambda request_id: TABLE)


def all_logits(runner: ModelRunner) -> np.ndarray[Any, Any]:
    plans = staggered_plans([request_of(0, TOKENS)], [15], chunk=6, most_context_tokens=6)
    logits = logits_of_all_rows(runner, plans, [TABLE], 4)
    return np.stack([logits[0, position] for position in range(len(TOKENS))])


# gpt2 and opt take positions from a table; gpt_bigcode has one KV head.
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gpt_bigcode", "gptj"])
def test_only_the_rows_asked_for_come_back(model_type: str, tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path, model_type=model_type)
    inputs = packed_context(0, 12)
    every = runner.forward(replace(inputs, logits_indices=np.arange(12))).logits
    some = runner.forward(replace(inputs, logits_indices=np.array([3, 11]))).logits
    none = runner.forward(replace(inputs, logits_indices=np.arange(0))).logits
    assert every.shape == (12, VOCAB_SIZE) and none.shape == (0, VOCAB_SIZE)
    assert some.dtype == np.float32 and some.flags.c_contiguous and some.flags.writeable
    np.testing.assert_allclose(some, every[[3, 11]], atol=1e-5)


def test_a_failing_forward_is_a_batch_error_and_the_next_one_works(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    inputs = packed_context(0, 12)
    expected = runner.forward(inputs).logits.copy()
    bad = replace(inputs, token_ids=np.full(12, VOCAB_SIZE + 5))
    with pytest.raises(ForwardError, match="forward pass of 12 rows failed: IndexError") as caught:
        runner.forward(bad)
    assert isinstance(caught.value.__cause__, IndexError)
    np.testing.assert_array_equal(runner.forward(inputs).logits, expected)


def test_a_sequence_goes_on_in_copied_blocks(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.forward(packed_context(0, 7))
    expected = runner.forward(packed_context(7, 9)).logits.copy()
    runner.forward(packed_context(0, 7))
    # The half-filled second block (1) is copied to block 5, which takes its place in the table.
    runner.copy_blocks(np.array([1], dtype=np.int32), np.array([5], dtype=np.int32))
    inputs = packed_context(7, 9)
    table = inputs.block_tables.copy()
    table[0, 1] = 5
    slots = np.array([5 * 4 + 3, TABLE[2] * 4])
    assert isinstance(runner, HfRunner) and isinstance(runner.backend, TorchAttention)
    for keys, _ in runner.backend.storage:
        keys[:, 1] = torch.nan
    got = runner.forward(replace(inputs, block_tables=table, slot_mapping=slots)).logits
    np.testing.assert_array_equal(got, expected)


def test_block_sizes_are_those_the_backend_declares(tmp_path: Path) -> None:
    class Picky(TorchAttention):
        supported_tokens_per_block = (16, 32)

    cpu = torch.device("cpu")
    model = load_model(tiny_checkpoint(tmp_path), dtype=torch.float32, device=cpu)
    runner = HfRunner(PackedModel(model), Picky(torch.float32, cpu), PlainRuntime(cpu))
    assert runner.spec.supported_tokens_per_block == (16, 32)
    with pytest.raises(ConfigError, match="tokens_per_block: 8 must be one of 16, 32"):
        runner.allocate_kv_cache(4, 8)
    runner.allocate_kv_cache(4, 16)


def test_two_runners_in_one_process_do_not_meet(tmp_path: Path) -> None:
    expected = [all_logits(tiny_runner(tmp_path / f"alone{seed}", seed=seed)) for seed in (0, 1)]
    runners = [tiny_runner(tmp_path / f"beside{seed}", seed=seed) for seed in (0, 1)]
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            got = list(threads.map(all_logits, runners))
            np.testing.assert_array_equal(got[0], expected[0])
            np.testing.assert_array_equal(got[1], expected[1])
