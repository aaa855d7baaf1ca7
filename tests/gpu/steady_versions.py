"""Prints which kernels a load compiles, and versions that later iterations would compile.

    python tests/gpu/steady_versions.py

A request must never wait for the compiler. What is driven is what serves: the runner of a tiny
checkpoint, loaded with its proof, its largest forward and its warm-up, then iterations of every
kind and blocks that move. Nothing is compiled or computed here, and no card is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backend_src")]

from tests.gpu.compile_kernels import recorded  # noqa: E402  (before any kernel)

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402

from inflight.api.config import InflightConfig  # noqa: E402
from inflight.batch.device_sampling import RowLists, SamplingInputs  # noqa: E402
from inflight.kernels.attention import AttentionPlan  # noqa: E402
from inflight.model.device.load import load_device_runner  # noqa: E402
from inflight.model.device.plain_runtime import PlainRuntime  # noqa: E402
from inflight.model.device.runner import DeviceRunner  # noqa: E402
from inflight.model.device.sizing import every_rule  # noqa: E402
from inflight.model.runner import PackedInputs  # noqa: E402
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint  # noqa: E402

MODEL_TYPES = ("llama", "qwen2_moe")
"""Without experts, and with shared ones."""
MOST, LONGEST, TOKENS_PER_BLOCK, NUM_BLOCKS = 64, 128, 16, 12
ROWS_OF_CONTEXT = 3
WANTED_PROGRAMS = 256
"""Of a card; a CPU has so few that no sequence would be split."""
ITERATIONS = ((0, 1), (1, 0), (2, 3), (0, 2), (16, 0), (1, 16), (0, 33), (0, MOST))
"""Contexts and generations."""


class CardLike(PlainRuntime):
    """Has memory, so the load runs the largest forward."""

    class Memory:
        def free(self) -> int:
            return 1 << 30

        def largest_use(self, work: Callable[[], object]) -> int:
            work()
            return 0

        def release(self) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.memory = self.Memory()  # type: ignore[assignment]


def load(folder: Path, model_type: str) -> DeviceRunner:
    """What the kernels of its proof say is not looked at: they have computed nothing."""
    config = InflightConfig(
        dtype="bf16",
        max_batch_size=MOST,
        max_num_tokens=4 * MOST,
        max_seq_len=LONGEST,
        tokens_per_block=TOKENS_PER_BLOCK,
        attention_backend="triton",
        kv_cache_host_memory_bytes=1 << 20,
    )
    proof = "inflight.model.device.proof"
    with (
        mock.patch(f"{proof}.check_typical", lambda *_: 0.0),
        mock.patch(f"{proof}.check_rows", lambda *_, **__: None),
    ):
        runner = load_device_runner(tiny_checkpoint(folder, model_type), config, CardLike())
    runner.allocate_kv_cache(NUM_BLOCKS, TOKENS_PER_BLOCK)
    return runner


def many_programs(**arguments: Any) -> AttentionPlan:
    return replace(_allocate(**arguments), wanted_programs=WANTED_PROGRAMS)


_allocate = AttentionPlan.allocate


def rows(contexts: int, generations: int, length: int) -> PackedInputs:
    """Sequences of ``length`` tokens, all in the same blocks; the last row of each samples."""
    sizes = np.array([ROWS_OF_CONTEXT] * contexts + [1] * generations, dtype=np.int32)
    starts = np.append(0, np.cumsum(sizes)).astype(np.int32)
    offsets = np.concatenate([np.arange(-size, 0) for size in sizes])
    positions = np.maximum(0, length + offsets).astype(np.int64)
    table = np.arange(-(-LONGEST // TOKENS_PER_BLOCK), dtype=np.int32)
    return PackedInputs(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        position_ids=positions,
        slot_mapping=positions,
        cu_seqlens_q=starts,
        context_lens=np.maximum(sizes, length).astype(np.int32),
        block_tables=np.tile(table, (len(sizes), 1)),
        logits_indices=starts[1:].astype(np.int64) - 1,
        num_context_sequences=contexts,
        num_context_tokens=contexts * ROWS_OF_CONTEXT,
    )


def some_rules(num_rows: int) -> Iterator[SamplingInputs]:
    """With all lists and without any, with penalties and without."""
    rules = every_rule(num_rows, VOCAB_SIZE)
    yield rules
    none, ones = np.zeros(0, dtype=np.int32), np.ones(num_rows, dtype=np.float32)
    no_lists = RowLists(starts=np.zeros(num_rows + 1, dtype=np.int32), ids=none)
    yield replace(
        rules,
        repetition_penalties=ones,
        presence_penalties=0 * ones,
        frequency_penalties=0 * ones,
        fresh_slots=none,
        counted=no_lists,
        biased=no_lists,
        biases=np.zeros(0, dtype=np.float32),
        masked=no_lists,
        normalize_log_probs=False,
    )


def serve(runner: DeviceRunner) -> None:
    for contexts, generations in ITERATIONS:
        for length in (1, 16, 17, LONGEST):
            inputs = rows(contexts, generations, length)
            runner.forward(inputs)
            runner.forward(replace(inputs, need_logits=False))
            for sampling in some_rules(contexts + generations):
                runner.forward(replace(inputs, sampling=sampling))
    for ids in ([3], [4, 1], [0, 5, 2]):
        block_ids = np.array(ids, dtype=np.int32)
        runner.write_blocks(block_ids, runner.read_blocks(block_ids))
        runner.copy_blocks(block_ids, block_ids + 6)
        runner.copy_blocks(block_ids, block_ids[::-1].copy())


def main() -> None:
    kernels: set[str] = set()
    new: list[str] = []
    for model_type in MODEL_TYPES:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(AttentionPlan, "allocate", many_programs),
            recorded() as versions,
        ):
            runner = load(Path(folder), model_type)
            at_load = set(versions)
            serve(runner)
        kernels.update(versions[key].kernel.__name__ for key in at_load)
        new += [key for key in versions if key not in at_load]
    print(json.dumps({"kernels": sorted(kernels), "new": new}))


if __name__ == "__main__":
    main()
