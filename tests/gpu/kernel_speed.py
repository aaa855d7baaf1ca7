"""Stage: how fast the kernels are, beside a copy and a matrix product measured in the same run.

    python -m tests.gpu.kernel_speed [--tune [FILE]]
    TRITON_INTERPRET=1 python -m tests.gpu.kernel_speed --cpu

Shapes are those of Llama 3 8B in bf16, and of Qwen3 30B-A3B for experts. Each kernel is repeated
inside a CUDA graph, so that only the card is measured. ``--tune`` measures the launches of
attention first, unless FILE has them, and keeps them there; without FILE where a server finds them.
With --cpu everything is small and runs under the
interpreter: it proves this script, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from inflight.api.config import InflightConfig
from inflight.kernels.tuning import is_measured, launches_for, tune
from inflight.model.device.load import launches_file
from tests.gpu.card import is_skipped
from tests.gpu.expert_works import QWEN3, SMALL_EXPERTS, expert_works
from tests.gpu.kernel_works import (
    LLAMA,
    SMALL,
    Work,
    attention,
    attention_shape,
    copy_work,
    elementwise,
    product_work,
)
from tests.gpu.rows import Row, emit
from tests.gpu.sampling_speed import LLAMA_SAMPLING, SMALL_SAMPLING, sampling_rows

SERVED = launches_file(InflightConfig())
"""Where a server looks for launches."""
TARGET_BANDWIDTH = 0.7
TARGET_PRODUCTS = 0.5
REPEATS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tune", type=Path, nargs="?", const=SERVED, metavar="FILE")
    options = parser.parse_args()
    if is_skipped("kernels", on_cpu=options.cpu):
        return
    torch.manual_seed(1)
    device = torch.device("cpu" if options.cpu else "cuda")
    sizes = SMALL if options.cpu else LLAMA
    copy = ceiling(copy_work(sizes, device), device)
    product = ceiling(product_work(sizes, device), device)
    shape = attention_shape(sizes)
    if options.tune and not options.cpu and not is_measured(options.tune, shape, device):
        tune(options.tune, shape, device)
    launches = launches_for(options.tune, shape, device)
    for work in (*elementwise(sizes, device), *attention(sizes, launches, device)):
        emit(measured(work, copy, product, device))
    # One after the other: each takes what it needs of the card's memory.
    for work in expert_works(SMALL_EXPERTS if options.cpu else QWEN3, device):
        emit(measured(work, copy, product, device))
    for row in sampling_rows(SMALL_SAMPLING if options.cpu else LLAMA_SAMPLING, device, seconds):
        emit(row)


def rate(work: Work, device: torch.device) -> tuple[float, str]:
    """In TB/s of what moves, else in TFLOP/s."""
    amount = work.num_bytes or work.operations
    return amount / seconds(work.run, device) / 1e12, "TB/s" if work.num_bytes else "TFLOP/s"


def ceiling(work: Work, device: torch.device) -> float:
    """The rate, which is also a row of its own."""
    value, unit = rate(work, device)
    emit(Row(what=work.what, value=value, unit=unit))
    return value


def measured(work: Work, copy: float, product: float, device: torch.device) -> Row:
    value, unit = rate(work, device)
    on_card = device.type == "cuda"
    target = TARGET_BANDWIDTH if work.num_bytes else TARGET_PRODUCTS
    return Row(
        what=work.what,
        value=value,
        unit=unit,
        ceiling=copy if work.num_bytes else product,
        target=target if on_card else None,
        note=work.note if on_card else "interpreted: no figure of speed",
    )


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one run; the least of five measurements."""
    run()  # compiles
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return min(times)


if __name__ == "__main__":
    main()
