"""Milliseconds of a step of the fused runner, and where they go.

::

    GOMP_SPINCOUNT=1000 OMP_NUM_THREADS=2 python -m tests.benchmarks.fused_speed [--kinds bf16]

(GOMP_SPINCOUNT as in service: on cores that others use too, waiting threads are not to spin.)

Steps are generations of B sequences that hold 256 tokens each, and one context of 512 tokens; by
default of the embedded model. The figure is the fastest of the repeats: other work on the machine
can only add to it. Two of the steps take turns with what bounds them (``compare/limits.py``):

- B 1 with reading memory. "weights alone" is the time in which all packed weights are read once at
  that rate, and "of the read rate" its share of the step.
- the context with multiplying large matrices in fp32, or for weights of another kind in bf16 where
  that is faster. "of the matmul rate" is the share of the step in which its arithmetic would be
  done at that rate, attention included as ``compare/bounds.py`` counts it; of a mixture of experts
  it is not told.

The shares in the second table come from steps of their own, in which every operation is called from
Python and timed; what they do not cover is Python between the operations. Those of the first table
make all these calls in one, where no operation is torch's (``native/recorded_calls.py``).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from tests.benchmarks.compare.bounds import ModelShape
from tests.benchmarks.compare.limits import MemoryReader, fastest, multiply_rate
from tests.benchmarks.compare.workloads import Job, Workload
from tests.numeric.packed_driver import request_of

BATCHES = (1, 8, 32, 64)
CONTEXT = 256
CHUNK = 512
TOKENS_PER_BLOCK = 32
BLOCKS_OF_A_SEQUENCE = CHUNK // TOKENS_PER_BLOCK
CONTEXT_STEP = f"context {CHUNK}"
TURNS = 4
ALONE, OF_READING, OF_MULTIPLYING = "weights alone", "of the read rate", "of the matmul rate"

GROUPS = {
    "linears": ("linear",),
    "attention": ("attend", "plan"),
    "norms": ("rms_norm", "layer_norm", "copy", "activate", "embed"),
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
    return made | {CONTEXT_STEP: packed(ScheduledBatch(0, context=(context,)))}


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


def shares(runner: FusedRunner, inputs: PackedInputs, seconds: float) -> dict[str, float]:
    """Of the time of a step whose calls are made one by one, by group."""
    decoder = runner.decoder
    runner.decoder = looked_at = decoder.unrecorded()
    ops = decoder.ops
    spent: dict[str, float] = defaultdict(float)
    kinds = ("linear", "elementwise", "attention")
    timed: dict[str, Any] = {kind: Stopwatch(getattr(ops, kind), spent) for kind in kinds}
    looked_at.ops = replace(ops, **timed)
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not rounds:
        runner.forward(inputs)
        rounds += 1
    total = time.perf_counter() - start
    runner.decoder = decoder
    parts = {group: sum(spent[name] for name in names) for group, names in GROUPS.items()}
    parts["rest"] = total - sum(parts.values())
    return {group: part / total for group, part in parts.items()}


def in_turns(
    step: Callable[[], object], rate: Callable[[float], float], seconds: float
) -> tuple[float, float]:
    """The least seconds of the step and the best rate beside it, ``seconds`` for each in all."""
    turn = seconds / TURNS
    pairs = [(fastest(step, turn), rate(turn)) for _ in range(TURNS)]
    return min(taken for taken, _ in pairs), max(reached for _, reached in pairs)


def shape_of(runner: FusedRunner) -> ModelShape:
    """Of its packed weights; ``layer_weights`` of experts are those of all, not of the chosen."""
    spec, weights = runner.decoder.spec, runner.decoder.weights
    packed = []
    for layer in weights.layers:
        packed += [layer.qkv, layer.output]
        if layer.mlp is not None:
            packed += [layer.mlp.up, layer.mlp.down]
        if layer.experts is not None:
            packed += [*layer.experts.gate_ups.members, *layer.experts.downs.members]
    return ModelShape(
        layer_weights=sum(linear.n * linear.k * (1 + linear.is_gate_up) for linear in packed),
        head_weights=weights.head.n * weights.head.k,
        num_layers=len(weights.layers),
        attention_width=spec.query_size,
        weight_bytes=sum(linear.data.numel() for linear in [weights.head, *packed]),
    )


class Measurement:
    """The steps of one kind of weights, measured one after the other."""

    def __init__(self, runner: FusedRunner, reader: MemoryReader, seconds: float) -> None:
        self._runner, self._reader, self._seconds = runner, reader, seconds
        self._shape = shape_of(runner)
        self._has_experts = any(layer.experts is not None for layer in runner.decoder.spec.layers)
        is_fp32 = runner.decoder.weights.head.kind == "f32"
        self._multiplied = ("fp32",) if is_fp32 else ("fp32", "bf16")
        self.milliseconds: dict[str, float] = {}
        self.shares: dict[str, dict[str, float]] = {}
        self.bounds: dict[str, str] = {}
        """By the last columns of the first table."""

    def take(self, name: str, inputs: PackedInputs) -> None:
        step = partial(self._runner.forward, inputs)
        if name == "B1":
            taken, read_bytes = in_turns(step, self._reader.rate, self._seconds)
            least = self._shape.weight_bytes / read_bytes
            self.bounds[ALONE] = f"{least * 1e3:.1f}"
            self.bounds[OF_READING] = f"{least / taken:.0%}"
        elif name == CONTEXT_STEP and not self._has_experts:
            taken, flops = in_turns(step, self._multiply_rate, self._seconds)
            chunk = Workload(name, (Job(0, (0,) * CHUNK, max_tokens=1),), concurrency=1)
            self.bounds[OF_MULTIPLYING] = f"{self._shape.flops(chunk) / flops / taken:.0%}"
        else:
            taken = fastest(step, self._seconds)
        self.milliseconds[name] = taken * 1e3
        self.shares[name] = shares(self._runner, inputs, self._seconds / 2)

    def _multiply_rate(self, seconds: float) -> float:
        """The best of the dtypes that the weights may be multiplied in."""
        return max(multiply_rate(dtype, seconds) for dtype in self._multiplied)


def measure(
    options: argparse.Namespace,
    directory: Path,
    library: NativeLibrary | None,
    kind: Any,
    reader: MemoryReader,
) -> Measurement:
    config = InflightConfig(dtype="fp32" if kind == "f32" else "bf16", max_num_tokens=CHUNK)
    runner = build_fused_runner(directory, config, library, weight_kind=kind)
    runner.allocate_kv_cache(max(BATCHES) * BLOCKS_OF_A_SEQUENCE, TOKENS_PER_BLOCK)
    measurement = Measurement(runner, reader, options.seconds)
    for name, inputs in steps(runner.spec.vocab_size).items():
        if options.only in name:
            measurement.take(name, inputs)
            print(f"{kind} {name}: {measurement.milliseconds[name]:.2f} ms", flush=True)
    return measurement


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As Markdown."""
    print()
    for cells in (heads, ["---"] * len(heads), *rows):
        print("| " + " | ".join(cells) + " |")


def report(measured: Mapping[str, Measurement]) -> None:
    names = list(next(iter(measured.values())).milliseconds)
    bounds = [ALONE, OF_READING, OF_MULTIPLYING]
    print_table(
        ["weights, ms", *names, *bounds],
        (
            [kind]
            + [f"{one.milliseconds[name]:.1f}" for name in names]
            + [one.bounds.get(bound, "-") for bound in bounds]
            for kind, one in measured.items()
        ),
    )
    groups = [*GROUPS, "rest"]
    print_table(
        ["weights", "step", *groups],
        (
            [kind, name, *(f"{one.shares[name][group]:.0%}" for group in groups)]
            for kind, one in measured.items()
            for name in names
        ),
    )


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
    threads = torch.get_num_threads()
    print(f"{threads} threads, {library.isa.name if library else 'torch'}")
    with tempfile.TemporaryDirectory() as folder:
        reader = MemoryReader(threads, Path(folder))
        kinds = options.kinds.split(",")
        report({kind: measure(options, directory, library, kind, reader) for kind in kinds})


if __name__ == "__main__":
    main()
