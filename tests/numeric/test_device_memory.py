"""DeviceRunner's faults, what it does when memory runs out, and blocks that are copied, offloaded
and brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError, EngineError, ForwardError
from inflight.model.attention import AttentionBackend
from inflight.model.device.load import load_device_runner, tune_kernels
from inflight.model.device.plain_runtime import PlainReplay, PlainRuntime
from inflight.model.device.runtime import Outputs
from inflight.model.device.torch_ops import TorchOps
from inflight.model.factory import load_runner
from inflight.model.fused.load import read_spec
from inflight.model.packed_model import PackedModel
from inflight.model.probe_course import THOROUGH
from inflight.model.runner import ModelRunner, PackedInputs
from inflight.model.torch_attention import TorchAttention
from tests.fakes.tiny_models import (
    VOCAB_SIZE,
    save_tiny_checkpoint,
    tiny_checkpoint,
    tiny_config,
)
from tests.numeric.device_driver import (
    CPU,
    NUM_BLOCKS,
    TABLES,
    TOKENS_PER_BLOCK,
    NotedRuntime,
    context,
    fill_storage,
    generation,
    logits_of,
    tiny_runner,
)

pytestmark = pytest.mark.numeric

HF = InflightConfig(dtype="fp32", num_threads=1, runner="hf", attention_backend="torch")


def test_a_failing_forward_is_a_batch_error_and_the_next_one_works(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    inputs = context(0)
    expected = logits_of(runner, inputs)
    bad = replace(inputs, token_ids=np.full(20, VOCAB_SIZE + 5))
    with pytest.raises(ForwardError, match="forward pass of 20 rows failed: IndexError"):
        runner.forward(bad)
    np.testing.assert_array_equal(logits_of(runner, inputs), expected)


class CountedMemory:
    """The books of a card of 1,000,000 bytes."""

    def __init__(self) -> None:
        self.num_releases = 0

    def free(self) -> int:
        return 1_000_000

    def in_use(self) -> int:
        return 123_456

    def largest_use(self, work: Callable[[], object]) -> int:
        work()
        return 300_000

    def release(self) -> None:
        self.num_releases += 1


class CardLikeRuntime(NotedRuntime):
    def __init__(self) -> None:
        super().__init__()
        self.memory = CountedMemory()  # type: ignore[assignment]


def test_running_out_of_memory_ends_the_batch_and_gives_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CardLikeRuntime()
    runner = tiny_runner(tmp_path, runtime)
    expected = logits_of(runner, context(0))
    releases = runtime.memory.num_releases
    with out_of_memory(monkeypatch), pytest.raises(ForwardError, match="OutOfMemoryError"):
        runner.forward(context(1))
    assert runtime.memory.num_releases == releases + 1
    np.testing.assert_array_equal(logits_of(runner, context(0)), expected)


def move_blocks(runner: ModelRunner) -> dict[str, Callable[[], object]]:
    """Each way to move a block, with the words of its fault."""
    ids = np.array([1], dtype=np.int32)
    contents = runner.read_blocks(ids)
    return {
        "copying 1 KV blocks": lambda: runner.copy_blocks(ids, ids + 1),
        "reading 1 KV blocks": lambda: runner.read_blocks(ids),
        "writing 1 KV blocks": lambda: runner.write_blocks(ids, contents),
    }


def test_blocks_that_find_no_memory_end_the_batch_and_give_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CardLikeRuntime()
    runner = tiny_runner(tmp_path, runtime)
    moves = move_blocks(runner)
    releases = runtime.memory.num_releases

    for name in ("copy_blocks", "gather_blocks", "scatter_blocks"):
        monkeypatch.setattr(TorchOps, name, lambda *arguments: out_of(torch.OutOfMemoryError))
    for words, move in moves.items():
        with pytest.raises(ForwardError, match=f"{words} failed: OutOfMemoryError"):
            move()
    assert runtime.memory.num_releases == releases + 3


class DeadRuntime(CardLikeRuntime):
    """Its device fails, and does nothing any more."""

    is_dead = False

    def check(self) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_blocks_of_a_device_that_has_failed_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = DeadRuntime()
    runner = tiny_runner(tmp_path, runtime)
    moves = move_blocks(runner)
    runtime.is_dead = True
    monkeypatch.setattr(runner.kv_cache, "_ids", lambda ids: torch.zeros(1)[ids + 7])
    for move in moves.values():
        with pytest.raises(EngineError, match="cpu has failed: IndexError"):
            move()


def test_transformers_classes_give_memory_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = DeadRuntime()
    monkeypatch.setattr("inflight.model.device.load.make_runtime", lambda device: runtime)
    runner = load_runner(tiny_checkpoint(tmp_path), HF)
    runner.allocate_kv_cache(NUM_BLOCKS, TOKENS_PER_BLOCK)
    expected = runner.forward(context(0)).logits
    releases = runtime.memory.num_releases
    with monkeypatch.context() as patch:
        patch.setattr(TorchAttention, "attend", lambda *arguments: out_of(torch.OutOfMemoryError))
        with pytest.raises(ForwardError, match="forward pass of 20 rows failed: OutOfMemoryError"):
            runner.forward(context(0))
        assert runtime.memory.num_releases == releases + 1
        runtime.is_dead = True
        with pytest.raises(EngineError, match="cpu has failed"):
            runner.forward(context(0))
    np.testing.assert_array_equal(runner.forward(context(0)).logits, expected)


def out_of(kind: type[Exception]) -> torch.Tensor:
    raise kind("no memory")


@contextmanager
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(TorchOps, "attend", lambda *arguments: out_of(torch.OutOfMemoryError))
        yield


def test_weights_that_do_not_fit_are_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        out_of_memory(monkeypatch),
        pytest.raises(CheckpointError, match="not fit into the memory of"),
    ):
        tiny_runner(tmp_path, CardLikeRuntime())


def test_a_pool_that_leaves_no_memory_for_a_forward_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        out_of_memory(monkeypatch),
        pytest.raises(ConfigError, match="kv_cache_free_gpu_mem_fraction: the KV cache leaves too"),
    ):
        tiny_runner(tmp_path)


def test_graphs_that_find_no_memory_are_left_out(tmp_path: Path) -> None:
    class Crowded(NotedRuntime):
        def capture(self, work: Callable[[], Outputs]) -> PlainReplay:
            if len(work()[0]) < 4:
                raise torch.OutOfMemoryError("no memory")
            return super().capture(work)

    runner = tiny_runner(tmp_path, Crowded())
    assert runner.captured_sizes == (4, 8)
    runner.forward(context(0))
    assert np.isfinite(logits_of(runner, generation(0))).all()


def test_kernels_that_compute_something_else_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        """Gives each row what attention gives another."""

        def __getattr__(self, name: str) -> Any:
            return getattr(TorchOps(), name)

        def attend(self, *arguments: Any) -> torch.Tensor:
            return TorchOps().attend(*arguments).flip(0)

    monkeypatch.setattr("inflight.model.device.load._make_ops", lambda *arguments: Wrong())
    with pytest.raises(CheckpointError, match="is not served: packed and plain logits differ"):
        tiny_runner(tmp_path)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernels_that_compute_one_row_of_many_wrong_are_not_served(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ShortTile:
        """As a tile would that ends at 32 rows."""

        is_wrong = False

        def __getattr__(self, name: str) -> Any:
            return getattr(TorchOps(), name)

        def attend(self, *arguments: Any) -> torch.Tensor:
            attended = TorchOps().attend(*arguments)
            if self.is_wrong:
                attended[32:33] = attended[:1]
            return attended

    monkeypatch.setattr("inflight.model.device.load._make_ops", lambda *arguments: ShortTile())
    model = tiny_config("llama", max_position_embeddings=THOROUGH.max_seq_len)
    checkpoint = save_tiny_checkpoint(tmp_path, model)
    config = InflightConfig(dtype=dtype, max_num_tokens=64, max_seq_len=20)
    load_device_runner(checkpoint, config, PlainRuntime(CPU))
    ShortTile.is_wrong = True
    with pytest.raises(CheckpointError, match="fused is not served: .*logits"):
        load_device_runner(checkpoint, config, PlainRuntime(CPU))


def test_kv_memory_is_what_the_largest_forward_and_the_scratch_block_leave(tmp_path: Path) -> None:
    spec = tiny_runner(tmp_path, CardLikeRuntime()).spec
    assert spec.kv_memory_bytes == 1_000_000 - 300_000 - TOKENS_PER_BLOCK * spec.kv_bytes_per_token


def test_transformers_classes_leave_what_the_largest_forward_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.model.device.load.make_runtime", lambda device: CardLikeRuntime())
    num_rows: list[int] = []
    forward = PackedModel.forward

    def noted(model: PackedModel, inputs: PackedInputs, backend: AttentionBackend) -> torch.Tensor:
        num_rows.append(len(inputs.token_ids))
        return forward(model, inputs, backend)

    monkeypatch.setattr(PackedModel, "forward", noted)
    config = HF.model_copy(update={"max_num_tokens": 200})
    spec = load_runner(tiny_checkpoint(tmp_path), config).spec
    assert spec.kv_memory_bytes == 1_000_000 - 300_000 and num_rows[-1] == 200


def test_a_forward_of_transformers_classes_that_does_not_fit_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.model.device.load.make_runtime", lambda device: CardLikeRuntime())
    monkeypatch.setattr(
        CountedMemory, "largest_use", lambda memory, work: out_of(torch.OutOfMemoryError)
    )
    with pytest.raises(CheckpointError, match="max_num_tokens 512, do not fit into the memory of"):
        load_runner(tiny_checkpoint(tmp_path), HF)


def test_a_full_card_keeps_the_usual_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = pytest.importorskip("inflight.kernels.tuning")
    runtime = CardLikeRuntime()
    runtime.device = torch.device("cuda")
    monkeypatch.setattr(tuning, "is_measured", lambda *arguments: False)
    monkeypatch.setattr(tuning, "tune", lambda *arguments: out_of(torch.OutOfMemoryError))
    config = InflightConfig(dtype="bf16", cache_dir=str(tmp_path / "cache"))
    said: list[str] = []
    spec = read_spec(tiny_checkpoint(tmp_path / "model"))
    tune_kernels(spec, config, runtime, lambda what, share: said.append(what))
    assert said == ["measuring kernels (once)"] and runtime.memory.num_releases == 1
    assert caplog.messages == ["no memory on cuda to measure kernels: they run as usual"]


def test_memory_of_the_device_and_pinned_memory_are_told(tmp_path: Path) -> None:
    class Pinning(CardLikeRuntime):
        def register(self, buffer: torch.Tensor) -> bool:
            return True

    host_bytes = {"kv_cache_host_memory_bytes": 1 << 20}
    usage = tiny_runner(tmp_path / "a", Pinning(), **host_bytes).memory_usage()
    assert usage == (123_456, usage.pinned)
    assert (1 << 20) < usage.pinned <= 2 << 20, "and as much again for blocks on their way"
    unpinned = tiny_runner(tmp_path / "b", CardLikeRuntime(), **host_bytes).memory_usage()
    assert unpinned == (123_456, 0)
    assert tiny_runner(tmp_path / "c", **host_bytes).memory_usage() == (0, 0)


def test_block_sizes_are_declared_and_checked(tmp_path: Path) -> None:
    config = InflightConfig(dtype="fp32", tokens_per_block=32)
    runner = load_device_runner(tiny_checkpoint(tmp_path), config, PlainRuntime(CPU))
    with pytest.raises(ConfigError, match="tokens_per_block: 8 must be one of 16, 32, 64, 128"):
        runner.allocate_kv_cache(4, 8)
    runner.allocate_kv_cache(4, 32)


def test_a_sequence_goes_on_in_copied_blocks(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.forward(context(0))
    expected = logits_of(runner, generation(0))
    # Blocks change places: every source is read before any target is written.
    runner.copy_blocks(np.array([6, 1], dtype=np.int32), np.array([1, 6], dtype=np.int32))
    inputs = generation(0)
    table = np.array([[1, 6]], dtype=np.int32)
    slots = 6 * TOKENS_PER_BLOCK + np.array([20 % TOKENS_PER_BLOCK])
    got = logits_of(runner, replace(inputs, block_tables=table, slot_mapping=slots))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_blocks_come_back_from_the_host_as_they_were(host_bytes: int, tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path, kv_cache_host_memory_bytes=host_bytes)
    runner.forward(context(0))
    expected = logits_of(runner, generation(0))
    runner.forward(context(0))
    contents = [runner.read_blocks(TABLES[0][i : i + 1])[0] for i in range(2)]
    block_bytes = TOKENS_PER_BLOCK * runner.spec.kv_bytes_per_token
    assert all(c.shape == (block_bytes,) and c.dtype == np.uint8 for c in contents)
    together = runner.read_blocks(TABLES[0])
    np.testing.assert_array_equal(together, contents)
    fill_storage(runner, float("nan"))
    kept = contents[0].copy()
    kept.flags.writeable = False
    runner.write_blocks(np.array([10, 3], dtype=np.int32), [kept, contents[1]])
    inputs = generation(0)
    slots = 3 * TOKENS_PER_BLOCK + np.array([20 % TOKENS_PER_BLOCK])
    table = np.array([[10, 3]], dtype=np.int32)
    got = logits_of(runner, replace(inputs, block_tables=table, slot_mapping=slots))
    np.testing.assert_array_equal(got, expected)


def test_the_format_of_blocks_names_what_their_bytes_are(tmp_path: Path) -> None:
    formats = {
        tiny_runner(tmp_path / name, dtype=dtype, kv_cache_dtype=kv).kv_block_format
        for name, dtype, kv in (("a", "fp32", "auto"), ("b", "bf16", "auto"), ("c", "bf16", "fp16"))
    }
    assert len(formats) == 3
