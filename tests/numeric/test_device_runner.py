"""DeviceRunner as the engine meets it, on a CPU that stands in for the device: rows that sample,
graphs and their padding, faults, blocks that are copied, offloaded and brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.errors import CheckpointError, ConfigError, ForwardError
from inflight.model.device.load import load_device_runner
from inflight.model.device.plain_runtime import PlainReplay, PlainRuntime
from inflight.model.device.runner import DeviceRunner
from inflight.model.device.runtime import Outputs
from inflight.model.device.torch_ops import TorchOps
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.packed_driver import request_of

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 12
RNG = np.random.default_rng(2)
TOKENS = [RNG.integers(3, VOCAB_SIZE, size=40) for _ in range(5)]
TABLES = [np.array(blocks, dtype=np.int32) for blocks in ([6, 1], [4, 0], [3, 8], [2, 7], [5, 9])]


class NotedRuntime(PlainRuntime):
    """Notes what a card would do: graphs that replay, and how often the host waits."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.replayed: list[int] = []
        self.num_waits = 0

    def capture(self, work: Callable[[], Outputs]) -> PlainReplay:
        runtime, size = self, len(work()[0])

        class Noted(PlainReplay):
            def replay(self) -> None:
                runtime.replayed.append(size)
                super().replay()

        return Noted(work)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_waits += 1
        return super().to_host(tensor)


def tiny_runner(
    directory: Path, runtime: PlainRuntime | None = None, model_type: str = "llama", **keys: Any
) -> DeviceRunner:
    values = {
        "dtype": "fp32", "max_num_tokens": 64, "max_batch_size": 8, "max_seq_len": 128,
        "tokens_per_block": TOKENS_PER_BLOCK,
    }  # fmt: skip
    config = InflightConfig.model_validate(values | keys)
    checkpoint = tiny_checkpoint(directory, model_type)
    runner = load_device_runner(checkpoint, config, runtime or NotedRuntime())
    runner.allocate_kv_cache(NUM_BLOCKS, TOKENS_PER_BLOCK)
    return runner


def packed(*chunks: tuple[int, Phase, int, int]) -> PackedInputs:
    """Of (sequence, phase, start, end); contexts first."""
    packer = Packer(
        max_num_tokens=64,
        max_batch_size=8,
        max_blocks_per_sequence=2,
        tokens_per_block=TOKENS_PER_BLOCK,
    )
    parts = [
        ScheduledChunk(request_of(i, TOKENS[i]), phase, start, end - start, True)
        for i, phase, start, end in chunks
    ]
    plan = ScheduledBatch(
        0,
        context=tuple(part for part in parts if part.phase is Phase.CONTEXT),
        generation=tuple(part for part in parts if part.phase is Phase.GENERATION),
    )
    return packer.pack(plan, TABLES.__getitem__)


def context(*sequences: int, end: int = 20) -> PackedInputs:
    return packed(*((i, Phase.CONTEXT, 0, end) for i in sequences))


def generation(*sequences: int, at: int = 20) -> PackedInputs:
    return packed(*((i, Phase.GENERATION, at, at + 1) for i in sequences))


def logits_of(runner: DeviceRunner, inputs: PackedInputs) -> npt.NDArray[np.float32]:
    logits = runner.forward(inputs).logits
    assert logits is not None
    return logits


def fill_storage(runner: DeviceRunner, value: float) -> None:
    with torch.inference_mode():
        runner.kv_cache.storage.fill_(value)


# Rows.


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


# Graphs.


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


def graph_logits(directory: Path, *sequences: int) -> npt.NDArray[np.float32]:
    runner = tiny_runner(directory)
    runner.forward(context(*sequences))
    return logits_of(runner, generation(*sequences))


def test_padding_touches_nothing_but_the_scratch_block(tmp_path: Path) -> None:
    """Every slot that no sequence of the iteration has written is NaN, and stays so to the bit."""
    runner = tiny_runner(tmp_path)
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
    np.testing.assert_allclose(logits, graph_logits(tmp_path / "clean", 0, 1, 2), atol=1e-5)


def test_a_row_comes_out_the_same_in_whatever_bucket(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.forward(context(0, 1, 2, end=12))
    alone = logits_of(runner, generation(0, at=12))
    for company in ((1,), (1, 2)):
        together = logits_of(runner, generation(0, *company, at=12))
        np.testing.assert_allclose(together[:1], alone, atol=1e-5)


# Faults.


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


@contextmanager
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def attend(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(TorchOps, "attend", attend)
        yield


def test_weights_that_do_not_fit_are_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        out_of_memory(monkeypatch),
        pytest.raises(CheckpointError, match="not fit into the memory of"),
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


# Memory and blocks.


def test_kv_memory_is_what_the_largest_forward_and_the_scratch_block_leave(tmp_path: Path) -> None:
    spec = tiny_runner(tmp_path, CardLikeRuntime()).spec
    assert spec.kv_memory_bytes == 1_000_000 - 300_000 - TOKENS_PER_BLOCK * spec.kv_bytes_per_token


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
    contents = [runner.read_blocks(TABLES[0][i : i + 1]) for i in range(2)]
    block_bytes = TOKENS_PER_BLOCK * runner.spec.kv_bytes_per_token
    assert all(c.shape == (1, block_bytes) and c.dtype == np.uint8 for c in contents)
    together = runner.read_blocks(TABLES[0])
    np.testing.assert_array_equal(together, np.concatenate(contents))
    fill_storage(runner, float("nan"))
    kept = contents[0].copy()
    kept.flags.writeable = False
    runner.write_blocks(np.array([10], dtype=np.int32), kept)
    runner.write_blocks(np.array([3], dtype=np.int32), contents[1])
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
