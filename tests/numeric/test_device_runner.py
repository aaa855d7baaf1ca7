"""DeviceRunner as the engine meets it: rows that sample, and graphs with their padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.batch import Phase
from tests.fakes.tiny_models import VOCAB_SIZE
from tests.numeric.device_driver import (
    NUM_BLOCKS,
    TABLES,
    TOKENS_PER_BLOCK,
    NotedRuntime,
    context,
    fill_storage,
    generation,
    graph_logits,
    logits_of,
    packed,
    tiny_runner,
)

pytestmark = pytest.mark.numeric


def test_only_the_rows_asked_for_come_back(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    inputs = context(0)
    every = logits_of(runner, replace(inputs, logits_indices=np.arange(20)))
    some = logits_of(runner, replace(inputs, logits_indices=np.array([3, 11])))
    none = logits_of(runner, replace(inputs, logits_indices=np.arange(0)))
    assert every.shape == (20, VOCAB_SIZE) and none.shape == (0, VOCAB_SIZE)
    assert some.dtype == np.float32 and some.flags.c_contiguous and some.flags.writeable
    np.testing.assert_allclose(some, every[[3, 11]], atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_without_logits_the_likeliest_ids_come_back(model_type: str, tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path, model_type=model_type)
    for inputs in (context(0, 1), generation(0, 1)):
        logits = logits_of(runner, inputs)
        output = runner.forward(replace(inputs, need_logits=False))
        assert output.logits is None and output.likeliest is not None
        assert output.likeliest.dtype == np.int32
        np.testing.assert_array_equal(output.likeliest, logits.argmax(axis=1))


def test_rows_that_are_not_finite_come_back_as_logits(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.forward(context(0, 1))
    with torch.inference_mode():
        runner.decoder.weights.norm.weight[3] = float("nan")
    for inputs in (context(2), generation(0, 1)):
        output = runner.forward(replace(inputs, need_logits=False))
        assert output.likeliest is None and output.logits is not None
        assert np.isnan(output.logits).all()


def test_logits_stay_what_they_are_when_the_next_iteration_runs(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.forward(context(0, 1))
    first = logits_of(runner, generation(0, 1))
    before = first.copy()
    runner.forward(generation(1, 0, at=21))
    np.testing.assert_array_equal(first, before)


def test_the_host_waits_once_and_not_at_all_where_nothing_is_sampled(tmp_path: Path) -> None:
    runtime = NotedRuntime()
    runner = tiny_runner(tmp_path, runtime)
    runtime.num_waits = 0
    runner.forward(replace(context(0, 1), logits_indices=np.arange(0)))
    assert runtime.num_waits == 0
    runner.forward(replace(generation(0, 1), need_logits=False))
    assert runtime.num_waits == 1
    runner.forward(generation(0, 1, at=21))
    assert runtime.num_waits == 2


def test_generations_alone_take_the_smallest_graph_that_holds_them(tmp_path: Path) -> None:
    runtime = NotedRuntime()
    runner = tiny_runner(tmp_path, runtime)
    assert runner.captured_sizes == (1, 2, 4, 8)
    runner.forward(context(0, 1, 2))
    runner.forward(packed((3, Phase.CONTEXT, 0, 20), (0, Phase.GENERATION, 20, 21)))
    runner.forward(replace(generation(0, 1), logits_indices=np.array([1])))
    assert runtime.replayed == []
    for sequences in ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3, 4)):
        runner.forward(generation(*sequences))
    assert runtime.replayed == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [({"cuda_graph_mode": False}, ()), ({"cuda_graph_cache_size": 2}, (1, 2))],
)
def test_graphs_follow_their_keys(
    keys: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    runner = tiny_runner(tmp_path, **keys)
    assert runner.captured_sizes == sizes
    runner.forward(context(0, 1, 2))
    eager = logits_of(runner, generation(0, 1, 2))
    np.testing.assert_allclose(eager, graph_logits(tmp_path / "graphs", 0, 1, 2), atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe"])
def test_padding_touches_nothing_but_the_scratch_block(model_type: str, tmp_path: Path) -> None:
    """Every slot that no sequence of the iteration has written is NaN, and stays so to the bit."""
    runner = tiny_runner(tmp_path, model_type=model_type)
    storage = runner.kv_cache.storage
    fill_storage(runner, float("nan"))
    runner.forward(context(0, 1, 2))
    before = storage.clone()
    assert runner.kv_cache.scratch_block == NUM_BLOCKS
    logits = logits_of(runner, generation(0, 1, 2))
    assert np.isfinite(logits).all() and len(logits) == 3
    changed = (storage.view(torch.int32) != before.view(torch.int32)).any(-1).any(3).any(0).any(0)
    slots = {(int(b), int(offset)) for b, offset in changed.nonzero()}
    written = {(int(TABLES[i][1]), 20 % TOKENS_PER_BLOCK) for i in range(3)}
    assert slots == written | {(NUM_BLOCKS, 0)}
    expected = graph_logits(tmp_path / "clean", 0, 1, 2, model_type=model_type)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen2_moe"])
def test_a_row_comes_out_the_same_in_whatever_bucket(model_type: str, tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path, model_type=model_type)
    runner.forward(context(0, 1, 2, end=12))
    alone = logits_of(runner, generation(0, at=12))
    for company in ((1,), (1, 2)):
        together = logits_of(runner, generation(0, *company, at=12))
        np.testing.assert_allclose(together[:1], alone, atol=1e-5)
