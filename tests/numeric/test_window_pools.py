"""Models with sliding windows over pools that give blocks back: transformers' own logits in fp32.

Before each forward every block that nobody holds is filled with NaN, those that a window has just
passed among them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from inflight.api import ExecutorConfig, KvCacheConfig
from inflight.api.config import InflightConfig
from inflight.api.kv_pools import KvPool
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.engine.forward import extents_of
from inflight.engine.pools import layer_groups
from inflight.kv_cache import KvCache, make_kv_cache
from inflight.model.factory import load_hf_runner
from inflight.model.fused.load import build_fused_runner
from inflight.model.fused.runner import FusedRunner
from inflight.model.hf_runner import HfRunner
from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.packing import Packer
from inflight.model.torch_attention import TorchAttention
from inflight.native.attention import NativeAttention
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.decoder_cases import plain_logits
from tests.numeric.native_library import native_library
from tests.numeric.packed_driver import request_of, staggered_plans

pytestmark = pytest.mark.numeric

LENGTHS, PROMPT_LENGTHS = (101, 57, 90), (75, 9, 40)
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = {None: 20, 8: 9}
"""By window: all sequences whole; and of each the window of 8, beside one chunk."""
CONFIG = ExecutorConfig(
    max_batch_size=4,
    max_num_tokens=32,
    max_seq_len=128,
    kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK),
)
RUNNERS = ["fused native", "fused torch", "hf native", "hf torch"]
Runner = FusedRunner | HfRunner


def make_runner(kind: str, directory: Path) -> Runner:
    runner, attention = kind.split()
    library = native_library()
    if runner == "fused":
        config = InflightConfig(dtype="fp32", num_threads=1)
        return build_fused_runner(directory, config, library if attention == "native" else None)
    backend = "cpu" if attention == "native" else "torch"
    config = InflightConfig(dtype="fp32", runner="hf", attention_backend=backend)
    return load_hf_runner(directory, config, library)


def runner_with_pools(kind: str, directory: Path) -> tuple[Runner, tuple[KvPool, ...]]:
    runner = make_runner(kind, directory)
    pools = tuple(
        KvPool(group, NUM_BLOCKS[group.window]) for group in layer_groups(runner.spec, CONFIG)
    )
    runner.allocate_kv_cache(pools[0].num_blocks, TOKENS_PER_BLOCK, pools[1:])
    return runner, pools


def storage_of(runner: Runner, pools: tuple[KvPool, ...]) -> list[list[Tensor]]:
    """Of each pool tensors whose second dimension is its blocks."""
    paged = runner.decoder.ops.attention if isinstance(runner, FusedRunner) else runner.backend
    if isinstance(paged, NativeAttentionBackend):
        paged = paged._native
    if isinstance(paged, NativeAttention):
        return [[pool.storage] for pool in paged._pools]
    paged = paged if isinstance(paged, TorchAttention) else paged._paged
    return [[t for layer in pool.layers for t in paged.storage[layer]] for pool in pools]


def poison_what_nobody_holds(kv: KvCache, storage: list[list[Tensor]]) -> int:
    """Returns how many of the blocks had been held once."""
    num_written = 0
    for pool, tensors in zip(kv.pools, storage, strict=True):
        free = [block.block_id for block in pool._pool.blocks if block.ref_count == 0]
        num_written += int(tensors[0][:, free].isfinite().any(0).flatten(1).any(1).sum())
        for tensor in tensors:
            tensor[:, free] = torch.nan
    return num_written


def logits_of_all_rows(
    runner: Runner, kv: KvCache, storage: list[list[Tensor]], sequences: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float32]:
    requests = [request_of(number, tokens) for number, tokens in enumerate(sequences)]
    for request in requests:
        kv.open(request.request_id)
    packer = Packer(
        max_num_tokens=64,
        max_batch_size=len(requests),
        max_blocks_per_sequence=-(-max(LENGTHS) // TOKENS_PER_BLOCK),
        tokens_per_block=TOKENS_PER_BLOCK,
        num_pools=len(kv.pools),
    )
    logits: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
    num_poisoned = 0
    for plan in staggered_plans(requests, PROMPT_LENGTHS, chunk=23, most_context_tokens=30):
        extents = extents_of(plan)
        kv.reserve(extents)
        kv.check_integrity()
        num_poisoned += poison_what_nobody_holds(kv, storage)
        tables = [pool.block_table for pool in kv.pools]
        inputs = packer.pack(plan, tables[0], tables[1:])
        output = runner.forward(replace(inputs, logits_indices=np.arange(plan.num_tokens)))
        assert output.logits is not None
        at = iter(output.logits)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                logits[chunk.request.request_id, position] = next(at)
        kv.commit(extents)
    assert num_poisoned > 5
    return np.stack([logits[key] for key in sorted(logits)])


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("model_type", ["mistral", "phi3", "gemma2", "gemma3_text"])
def test_pools_that_give_blocks_back_change_no_logit(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    """Block reuse is off: what is cached would be poisoned as well."""
    directory = tiny_checkpoint(tmp_path, model_type)
    runner, pools = runner_with_pools(kind, directory)
    cache_config = KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, enable_block_reuse=False)
    kv = make_kv_cache(pools, cache_config, clock=lambda: 0.0, observers=())
    storage = storage_of(runner, pools)
    for tensors in storage:
        for tensor in tensors:
            tensor.fill_(torch.nan)
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, VOCAB_SIZE, size=length) for length in LENGTHS]
    got = logits_of_all_rows(runner, kv, storage, sequences)
    np.testing.assert_allclose(got, plain_logits(directory, sequences), atol=1e-4, rtol=0)


def computed_alone(
    runner: Runner, kv: KvCache, number: int, tokens: npt.NDArray[np.int64]
) -> tuple[int, npt.NDArray[np.float32]]:
    """A request from its start to its end: tokens that were reused, and the logits of the rest."""
    packer = Packer(
        max_num_tokens=64,
        max_batch_size=1,
        max_blocks_per_sequence=-(-len(tokens) // TOKENS_PER_BLOCK),
        tokens_per_block=TOKENS_PER_BLOCK,
        num_pools=len(kv.pools),
    )
    request = request_of(number, tokens)
    kv.open(number)
    start = kv.match_prefix(number, request.token_ids).num_tokens
    chunk = ScheduledChunk(request, Phase.CONTEXT, start, len(tokens) - start, True)
    plan = ScheduledBatch(0, context=(chunk,))
    copies = kv.reserve(extents_of(plan))
    for pool, of_pool in enumerate((copies, *copies.further)):
        runner.copy_blocks(of_pool.source_ids, of_pool.target_ids, pool)
    tables = [pool.block_table for pool in kv.pools]
    inputs = packer.pack(plan, tables[0], tables[1:])
    output = runner.forward(replace(inputs, logits_indices=np.arange(plan.num_tokens)))
    kv.commit(extents_of(plan))
    kv.close(number)
    assert output.logits is not None
    return start, output.logits.copy()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_a_part_that_is_copied_in_every_pool_changes_no_logit(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    directory = tiny_checkpoint(tmp_path, model_type)
    runner, pools = runner_with_pools(kind, directory)
    kv = make_kv_cache(pools, CONFIG.kv_cache_config, clock=lambda: 0.0, observers=())
    rng = np.random.default_rng(7)
    first = rng.integers(3, VOCAB_SIZE, size=60)
    second = np.concatenate([first[:45], rng.integers(3, VOCAB_SIZE, size=15)])
    third = np.concatenate([first, first[:4]])  # the last block of the first was not full
    computed_alone(runner, kv, 1, first)
    for number, tokens, reused in ((2, second, 45), (3, third, 60)):
        start, logits = computed_alone(runner, kv, number, tokens)
        assert start == reused
        expected = plain_logits(directory, [tokens])[start:]
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["fused native", "hf torch"])
def test_the_spec_says_which_layers_have_a_window(kind: str, tmp_path: Path) -> None:
    spec = make_runner(kind, tiny_checkpoint(tmp_path / "mixed", "gemma2")).spec
    assert [(group.window, group.layers) for group in spec.layer_groups] == [
        (None, (1,)),
        (8, (0, 2)),
    ]
    sizes = [group.bytes_per_token for group in spec.layer_groups]
    assert sizes[1] == 2 * sizes[0] and sum(sizes) == spec.kv_bytes_per_token
    assert make_runner(kind, tiny_checkpoint(tmp_path / "plain", "llama")).spec.layer_groups == ()
