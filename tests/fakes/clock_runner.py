"""A model that computes nothing: it moves a clock by what a cost model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import KvPool
from inflight.cli.calibration import shape_of
from inflight.model.runner import (
    ForwardOutput,
    MemoryUsage,
    ModelSpec,
    PackedInputs,
    nothing_beside,
)
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator.cost_model import CostModel
from inflight.simulator.trace import VOCAB_SIZE


class ClockRunner:
    """A ModelRunner."""

    spec = ModelSpec(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        num_layers=1,
        kv_bytes_per_token=1,
        supported_tokens_per_block=(),
        dtype="fp32",
        device="cpu",
    )

    def __init__(self, cost: CostModel, seconds_per_block: float = 0.0) -> None:
        """``seconds_per_block``: to move one out of the KV cache, or into it."""
        self.cost = cost
        self.seconds_per_block = seconds_per_block
        self.now = 0.0
        self.shapes: list[IterationShape] = []

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        self._tokens_per_block = tokens_per_block  # a byte of KV for each

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        self.shapes.append(shape_of(inputs))
        self.now += self.cost.seconds(self.shapes[-1])
        likeliest = np.zeros(len(inputs.logits_indices), dtype=np.int32)
        return ForwardOutput(logits=None, likeliest=likeliest)

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        pass

    kv_block_format = "nothing"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        self.now += self.seconds_per_block * len(block_ids)
        return [np.zeros(self._tokens_per_block, dtype=np.uint8) for _ in block_ids]

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self.now += self.seconds_per_block * len(block_ids)
