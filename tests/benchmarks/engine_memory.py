"""Where an engine's weights lie: huge pages against the mapped file, alternated in one process.

``python -m tests.benchmarks.engine_memory [--dtype bf16] [--repeat 60]``: milliseconds of a
generation step at batch 1, the least of all repeats, and seconds to load.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from unittest.mock import patch

from inflight.api.config import InflightConfig, set_thread_defaults

set_thread_defaults()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from inflight.api import Request  # noqa: E402
from inflight.batch import LlmRequest, Phase, ScheduledBatch, ScheduledChunk  # noqa: E402
from inflight.checkpoint import prepare_checkpoint  # noqa: E402
from inflight.engine_files import file  # noqa: E402
from inflight.model.factory import load_runner  # noqa: E402
from inflight.model.packing import Packer  # noqa: E402
from inflight.model.runner import ModelRunner, PackedInputs  # noqa: E402
from inflight.native.cpu import usable_cores  # noqa: E402

CONTEXT = 40
TOKENS_PER_BLOCK = 32


def generation_step() -> PackedInputs:
    request = LlmRequest(
        0,
        Request(input_token_ids=tuple(range(CONTEXT)), max_tokens=1),
        arrival_time=0.0,
        rank=0.0,
        end_ids=(),
        seed=0,
    )
    packer = Packer(
        max_num_tokens=1,
        max_batch_size=1,
        max_blocks_per_sequence=2,
        tokens_per_block=TOKENS_PER_BLOCK,
    )
    chunk = ScheduledChunk(request, Phase.GENERATION, CONTEXT - 1, 1, True)
    table = np.arange(2, dtype=np.int32)
    return packer.pack(ScheduledBatch(0, generation=(chunk,)), lambda _: table)


def load(directory: Path, config: InflightConfig, *, huge: bool) -> tuple[ModelRunner, float]:
    started = time.perf_counter()
    with patch.object(file, "gives_huge_pages", lambda: huge):
        runner = load_runner(directory, config)
    seconds = time.perf_counter() - started
    runner.allocate_kv_cache(2, TOKENS_PER_BLOCK)
    return runner, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--repeat", type=int, default=60)
    options = parser.parse_args()
    config = InflightConfig(dtype=options.dtype, max_seq_len=512, num_threads=usable_cores())
    directory = prepare_checkpoint("", "", progress=print).directory
    load(directory, config, huge=True)  # builds it where there is none
    runners, best = {}, {}
    for name, huge in (("huge pages", True), ("mapped file", False)):
        runners[name], seconds = load(directory, config, huge=huge)
        best[name] = float("inf")
        print(f"{name}: loaded in {seconds:.2f} s")
    inputs = generation_step()
    for _ in range(options.repeat):
        for name, runner in runners.items():
            started = time.perf_counter()
            runner.forward(inputs)
            best[name] = min(best[name], time.perf_counter() - started)
    for name, seconds in best.items():
        print(f"{name}: {seconds * 1e3:.2f} ms a step, {torch.get_num_threads()} threads")
    print(f"mapped / huge: {best['mapped file'] / best['huge pages']:.3f}")


if __name__ == "__main__":
    main()
