"""Drives a DeviceRunner of a tiny model as the engine would; a CPU stands in for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.model.device.load import load_device_runner
from inflight.model.device.plain_runtime import PlainReplay, PlainRuntime
from inflight.model.device.runner import DeviceRunner
from inflight.model.device.runtime import Outputs
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.packed_driver import request_of

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


def graph_logits(
    directory: Path, *sequences: int, model_type: str = "llama"
) -> npt.NDArray[np.float32]:
    runner = tiny_runner(directory, model_type=model_type)
    runner.forward(context(*sequences))
    return logits_of(runner, generation(*sequences))
