"""KV blocks between a device and the host: several at once, with one wait, each place by itself."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.api.kv import MOVED_BYTES
from inflight.model.device.runtime import Mark
from inflight.model.device.torch_ops import TorchOps
from tests.numeric.device_driver import TOKENS_PER_BLOCK, NotedRuntime, tiny_runner

pytestmark = pytest.mark.numeric

HOST_BYTES = 1 << 20
THREE = np.array([7, 2, 11], dtype=np.int32)


class NotedMoves(NotedRuntime):
    """Notes when the host waits for what was launched, and what it pins besides."""

    def __init__(self) -> None:
        super().__init__()
        self.num_marks_waited = 0
        self.num_pinned = 0

    def mark(self) -> Mark:
        runtime, mark = self, super().mark()

        class Noted:
            def wait(self) -> None:
                runtime.num_marks_waited += 1
                mark.wait()

        return Noted()

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.num_pinned += 1
        return super().pinned(count, dtype)

    def waits(self) -> tuple[int, int]:
        """Since the last call: for marks, and for single tensors."""
        waits = self.num_marks_waited, self.num_waits
        self.num_marks_waited = self.num_waits = 0
        return waits


@pytest.mark.parametrize("host_bytes", [0, HOST_BYTES])
def test_blocks_move_together_and_the_host_waits_once(host_bytes: int, tmp_path: Path) -> None:
    runtime = NotedMoves()
    runner = tiny_runner(tmp_path, runtime, kv_cache_host_memory_bytes=host_bytes)
    storage = runner.kv_cache.storage
    with torch.inference_mode():
        storage.normal_()
    before = storage.clone()
    runtime.waits()
    runtime.num_pinned = 0
    contents = runner.read_blocks(THREE)
    assert runtime.waits() == (1, 0)
    assert runtime.num_pinned == (0 if host_bytes else 3), "without a pool each is pinned alone"
    for block_id, content in zip(THREE.tolist(), contents, strict=True):
        expected = before[:, :, block_id].contiguous().view(torch.uint8).flatten()
        np.testing.assert_array_equal(content, expected.numpy())

    targets = np.array([0, 1, 2], dtype=np.int32)
    runner.write_blocks(targets, contents)
    assert runtime.waits() == (1, 0)
    assert torch.equal(storage[:, :, :3], before[:, :, THREE.tolist()])
    assert torch.equal(storage[:, :, 3:], before[:, :, 3:])


def test_a_full_pool_still_has_places_for_blocks_on_their_way(tmp_path: Path) -> None:
    runtime = NotedMoves()
    runner = tiny_runner(tmp_path, runtime, kv_cache_host_memory_bytes=HOST_BYTES)
    pool = runner.kv_cache._pool
    assert pool is not None
    in_tier = HOST_BYTES // (runner.spec.kv_bytes_per_token * TOKENS_PER_BLOCK)
    held = [runner.read_blocks(THREE[:1])[0] for _ in range(in_tier)]
    runtime.num_pinned = 0
    left = pool.num_free
    on_their_way = list(runner.read_blocks(THREE))
    assert runtime.num_pinned == 0 and pool.num_free == left - 3
    del on_their_way[1]
    gc.collect()
    assert pool.num_free == left - 2, "each goes by itself"
    held += [runner.read_blocks(THREE[:1])[0] for _ in range(pool.num_free)]
    (beyond,) = runner.read_blocks(THREE[:1])
    assert runtime.num_pinned == 1
    np.testing.assert_array_equal(beyond, held[-1])


def test_as_much_as_is_ever_moved_at_once_is_moved_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the device's memory for it is there."""
    gather, sizes = TorchOps.gather_blocks, []

    def noted(ops: TorchOps, storage: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids))
        return gather(ops, storage, ids)

    monkeypatch.setattr(TorchOps, "gather_blocks", noted)
    runner = tiny_runner(tmp_path, kv_cache_host_memory_bytes=HOST_BYTES)
    in_tier = HOST_BYTES // (runner.spec.kv_bytes_per_token * TOKENS_PER_BLOCK)
    assert max(sizes) == in_tier < MOVED_BYTES // (HOST_BYTES // in_tier)
