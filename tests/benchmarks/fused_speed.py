"""Milliseconds of a step of the fused runner, and where they go.

::

    GOMP_SPINCOUNT=1000 OMP_NUM_THREADS=2 python -m tests.benchmarks.fused_speed [--kinds bf16]

(GOMP_SPINCOUNT as in service: on cores that others use too, waiting threads are not to spin.)

Steps are generations of B sequences that hold 256 tokens each, and one context of 512 tokens; by
default of the embedded model. The figure is the fastest of the repeats: other work on the machine
can only add to it. The shares come from steps of their own, in which every operation is timed; what
they do not cover is Python between the operations. "weights" is the time that reading all packed
weights once would take at the rate torch sums 256 MiB: what a small batch is bounded by.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.checkpoint import prepare_checkpoint
from inflight.model.fused.load import build_fused_runner
from inflight.model.fused.runner import FusedRunner
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs
from inflight.native.library import NativeLibrary, load_native
from tests.numeric.packed_driver import request_of

BATCHES = (1, 8, 32, 64)
CONTEXT = 256
CHUNK = 512
TOKENS_PER_BLOCK = 32
BLOCKS_OF_A_SEQUENCE = CHUNK // TOKENS_PER_BLOCK

GROUPS = {
    "linears": ("linear",),
    "attention": ("attend", "plan"),
    "norms": ("rms_norm", "embed"),
}


def steps(vocab_size: int) -> dict[str, PackedInputs]:
    rng = np.random.default_rng(0)
    num_blocks = max(BATCHES) * BLOCKS_OF_A_SEQUENCE
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(max(BATCHES), -1)

    def packed(plan: ScheduledBatch) -> PackedInputs:
        packer = Packer(
            max_num_tokens=CHUNK,
            max_batch_size=max(BATCHES),
            max_blocks_per_sequence=BLOCKS_OF_A_SEQUENCE,
            tokens_per_block=TOKENS_PER_BLOCK,
        )
        return packer.pack(plan, tables.__getitem__)

    def part(i: int, phase: Phase, start: int, num_tokens: int) -> ScheduledChunk:
        request = request_of(i, rng.integers(vocab_size, size=start + num_tokens).tolist())
        return ScheduledChunk(request, phase, start, num_tokens, True)

    generations = [part(i, Phase.GENERATION, CONTEXT - 1, 1) for i in range(max(BATCHES))]
    made = {f"B{n}": packed(ScheduledBatch(0, generation=tuple(generations[:n]))) for n in BATCHES}
    context = part(0, Phase.CONTEXT, 0, CHUNK)
    return made | {f"context {CHUNK}": packed(ScheduledBatch(0, context=(context,)))}


def fastest(call: Callable[[], object], seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


class Stopwatch:
    """Stands in for an object of operations and adds up the time of its methods."""

    def __init__(self, ops: Any, spent: dict[str, float]) -> None:
        self._ops = ops
        self._spent = spent

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._timed("linear", self._ops, arguments, options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ops, name)
        group = "linear" if name in ("gate_up", "logits") else name
        return lambda *arguments, **options: self._timed(group, method, arguments, options)

    def _timed(self, name: str, call: Any, arguments: Any, options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            self._spent[name] += time.perf_counter() - start


def shares(runner: FusedRunner, inputs: PackedInputs, seconds: float) -> str:
    decoder = runner.decoder
    ops = decoder.ops
    spent: dict[str, float] = defaultdict(float)
    kinds = ("linear", "elementwise", "attention")
    timed: dict[str, Any] = {kind: Stopwatch(getattr(ops, kind), spent) for kind in kinds}
    decoder.ops = replace(ops, **timed)
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not rounds:
        runner.forward(inputs)
        rounds += 1
    total = time.perf_counter() - start
    decoder.ops = ops
    parts = {group: sum(spent[name] for name in names) for group, names in GROUPS.items()}
    parts["rest"] = total - sum(parts.values())
    return "  ".join(f"{group} {part / total:4.0%}" for group, part in parts.items())


def read_rate(seconds: float) -> float:
    """Bytes a second of reading 256 MiB."""
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / fastest(numbers.sum, seconds)


def weight_bytes(runner: FusedRunner) -> int:
    weights = runner.decoder.weights
    packed = [weights.head]
    for layer in weights.layers:
        packed += [layer.qkv, layer.output]
        if layer.mlp is not None:
            packed += [layer.mlp.up, layer.mlp.down]
        if layer.experts is not None:
            packed += [*layer.experts.gate_ups.members, *layer.experts.downs.members]
    return sum(linear.data.numel() for linear in packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-dir", default="", help="empty: the embedded model")
    parser.add_argument("--kinds", default="bf16,f32,q8_0", help="of weights")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each figure")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--torch", action="store_true", help="the reference operations")
    options = parser.parse_args()
    directory = prepare_checkpoint(options.model_dir, "", progress=print).directory
    library = None if options.torch else load_native("")
    print(f"{torch.get_num_threads()} threads, {library.isa.name if library else 'torch'}")
    print(f"{'weights':8}{'step':12}{'ms':>8}{'weights':>9}")
    for kind in options.kinds.split(","):
        report(options, directory, library, kind)


def report(
    options: argparse.Namespace, directory: Path, library: NativeLibrary | None, kind: Any
) -> None:
    config = InflightConfig(dtype="fp32" if kind == "f32" else "bf16", max_num_tokens=CHUNK)
    runner = build_fused_runner(directory, config, library, weight_kind=kind)
    runner.allocate_kv_cache(max(BATCHES) * BLOCKS_OF_A_SEQUENCE, TOKENS_PER_BLOCK)
    for name, inputs in steps(runner.spec.vocab_size).items():
        if options.only not in name:
            continue
        taken = fastest(partial(runner.forward, inputs), options.seconds)
        least = weight_bytes(runner) / read_rate(options.seconds / 2)
        parts = shares(runner, inputs, options.seconds / 2)
        print(f"{kind:8}{name:12}{taken * 1e3:8.2f}{least * 1e3:9.2f}  {parts}", flush=True)


if __name__ == "__main__":
    main()
