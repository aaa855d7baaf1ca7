"""The bytes of blocks: real KV through every tier, into another runner, gives the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.kv_cache.identity import BlockKey, PrefixIdentity, block_key
from inflight.kv_cache.tiers import DiskStorage, HostStorage
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.storage import TierBlock
from inflight.model.attention import KvLayer
from inflight.model.factory import load_hf_runner
from inflight.model.fused.load import build_fused_runner
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner
from inflight.model.torch_attention import TorchAttention
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.native_library import native_library
from tests.numeric.packed_driver import request_of

pytestmark = pytest.mark.numeric

TOKENS_PER_BLOCK = 16
TOKENS = np.random.default_rng(4).integers(3, VOCAB_SIZE, size=40)
TABLE = np.array([6, 1, 4], dtype=np.int32)
OTHER_TABLE = np.array([2, 7, 0], dtype=np.int32)


def fused_native(directory: Path, kv: str) -> ModelRunner:
    config = InflightConfig(dtype="bf16" if kv == "bf16" else "fp32", kv_cache_dtype=kv)
    return build_fused_runner(directory, config, native_library())


def fused_torch(directory: Path, kv: str) -> ModelRunner:
    return build_fused_runner(directory, InflightConfig(dtype="fp32", kv_cache_dtype=kv), None)


def hf_native(directory: Path, kv: str) -> ModelRunner:
    config = InflightConfig(
        dtype="fp32", kv_cache_dtype=kv, tokens_per_block=16, attention_backend="cpu"
    )
    return load_hf_runner(directory, config, native_library())


def hf_torch(directory: Path, kv: str) -> ModelRunner:
    config = InflightConfig(dtype="fp32", kv_cache_dtype=kv, attention_backend="torch")
    return load_hf_runner(directory, config, None)


def context_logits(
    runner: ModelRunner, table: npt.NDArray[np.int32], start: int, end: int
) -> npt.NDArray[np.float32]:
    """float32[1, vocab_size]: of the last of tokens [start, end)."""
    packer = Packer(
        max_num_tokens=64,
        max_batch_size=2,
        max_blocks_per_sequence=3,
        tokens_per_block=TOKENS_PER_BLOCK,
    )
    part = ScheduledChunk(request_of(0, TOKENS), Phase.CONTEXT, start, end - start, True)
    inputs = packer.pack(ScheduledBatch(0, context=(part,)), lambda request_id: table)
    logits = runner.forward(inputs).logits
    assert logits is not None
    return logits


def keys() -> list[BlockKey]:
    parent, found = PrefixIdentity().root_digest(), []
    for start in (0, TOKENS_PER_BLOCK):
        key = block_key(parent, TOKENS[start : start + TOKENS_PER_BLOCK].astype(np.int32))
        found.append(key)
        parent = key.digest
    return found


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("make", [fused_native, fused_torch, hf_native, hf_torch])
def test_blocks_through_all_tiers_give_identical_logits(
    make: Callable[[Path, str], ModelRunner], kv: str, tmp_path: Path
) -> None:
    directory = tiny_checkpoint(tmp_path / "model")
    runner, other = make(directory, kv), make(directory, kv)
    for each in (runner, other):
        each.allocate_kv_cache(8, TOKENS_PER_BLOCK)
    assert runner.kv_block_format == other.kv_block_format
    context_logits(runner, TABLE, 0, 32)
    contents = runner.read_blocks(TABLE[:2])
    expected = context_logits(runner, TABLE, 32, 40)
    block_bytes = TOKENS_PER_BLOCK * runner.spec.kv_bytes_per_token
    assert all(c.dtype == np.uint8 and c.shape == (block_bytes,) for c in contents)
    assert all(c.base is None or c.base.nbytes == c.nbytes for c in contents), "each by itself"

    host = HostStorage(2 * block_bytes)
    for key, content in zip(keys(), contents, strict=True):
        host.put(TierBlock(key, content))
    files = BlockFiles(b"f" * 32)
    (tmp_path / "disk").mkdir()
    disk = DiskStorage(tmp_path / "disk", 1 << 30, files, keeps_files=True)
    for block in host.most_valuable_first():
        disk.put(block)
    disk.close()
    again = DiskStorage(tmp_path / "disk", 1 << 30, files, keeps_files=True)
    for at, (key, content) in enumerate(zip(keys(), contents, strict=True)):
        read = again.get(key)
        assert read is not None and read.content.tobytes() == content.tobytes()
        other.write_blocks(OTHER_TABLE[at : at + 1], [read.content])
    again.close()
    read_again = other.read_blocks(OTHER_TABLE[:2])
    assert [c.tobytes() for c in read_again] == [c.tobytes() for c in contents]
    np.testing.assert_array_equal(context_logits(other, OTHER_TABLE, 32, 40), expected)


def test_layers_of_different_shapes_keep_their_places() -> None:
    layers = [
        KvLayer(num_kv_heads=2, key_dim=8, value_dim=4),
        KvLayer(num_kv_heads=1, key_dim=4, value_dim=6),
    ]
    backend = TorchAttention(torch.float32, torch.device("cpu"))
    backend.allocate(layers, num_blocks=6, tokens_per_block=4)
    tensors = [tensor for pair in backend.storage for tensor in pair]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    contents = backend.read_blocks(np.array([1, 4], dtype=np.int32))
    block_bytes = 4 * backend.kv_bytes_per_token(layers)
    assert [content.shape for content in contents] == [(block_bytes,)] * 2
    for content in contents:
        content.flags.writeable = False
    backend.write_blocks(np.array([5, 1], dtype=np.int32), contents)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(new[:, [0, 2, 3, 4]], old[:, [0, 2, 3, 4]])
        assert torch.equal(new[:, 5], old[:, 1]) and torch.equal(new[:, 1], old[:, 4])
