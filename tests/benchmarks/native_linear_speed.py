"""Milliseconds of all linears of one iteration, native against torch, and what bounds them.

::

    OMP_NUM_THREADS=2 python tests/benchmarks/native_linear_speed.py [--rows 1,8,32] [--kinds bf16]

The shapes are SmolLM2-135M's: 30 layers of query-key-value, output, gate-and-up, down, and the
head. Each layer has weights of its own, so that they come from memory as in service. The figure is
the fastest of the repeats: other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native.library import Isa, load_native
from inflight.native.linear import NativeLinear
from inflight.native.packed import PackedLinear, WeightKind, pack_gate_up, pack_linear

HIDDEN, INTERMEDIATE, QKV, VOCABULARY, LAYERS = 576, 1536, 960, 49152, 30
PARAMETERS = LAYERS * HIDDEN * (QKV + HIDDEN + 3 * INTERMEDIATE) + HIDDEN * VOCABULARY
HEAD_ROWS = 64
"""Rows that sample, at most: a context chunk needs the head for its last row only."""


@dataclass
class Buffers:
    """Activations of one iteration of T rows."""

    hidden: Tensor
    qkv: Tensor
    inner: Tensor
    residual: Tensor
    logits: Tensor

    @classmethod
    def of(cls, rows: int) -> Buffers:
        bf16 = torch.bfloat16
        return cls(
            torch.randn(rows, HIDDEN).to(bf16),
            torch.empty(rows, QKV),
            torch.empty(rows, INTERMEDIATE, dtype=bf16),
            torch.zeros(rows, HIDDEN),
            torch.empty(min(rows, HEAD_ROWS), VOCABULARY),
        )


def random_weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k) / k**0.5


def native_step(kind: WeightKind, ops: NativeLinear) -> tuple[Callable[[Buffers], None], int]:
    """One iteration's linears, and the bytes of weights that it reads."""

    def plain(n: int, k: int) -> PackedLinear:
        return pack_linear(random_weight(n, k), None, kind)

    layers = []
    for _ in range(LAYERS):
        gate, up = random_weight(INTERMEDIATE, HIDDEN), random_weight(INTERMEDIATE, HIDDEN)
        layers.append(
            (
                plain(QKV, HIDDEN),
                plain(HIDDEN, HIDDEN),
                pack_gate_up(gate, up, kind),
                plain(HIDDEN, INTERMEDIATE),
            )
        )
    head = plain(VOCABULARY, HIDDEN)

    def step(b: Buffers) -> None:
        for qkv, output, gate_up, down in layers:
            ops(b.hidden, qkv, b.qkv)
            ops(b.hidden, output, b.residual, accumulate=True)
            ops.gate_up(b.hidden, gate_up, b.inner, "silu")
            ops(b.inner, down, b.residual, accumulate=True)
        ops.logits(b.hidden[: len(b.logits)], head, b.logits)

    everything = [packed for layer in layers for packed in layer] + [head]
    return step, sum(packed.data.numel() for packed in everything)


def torch_step() -> tuple[Callable[[Buffers], None], int]:
    def plain(n: int, k: int) -> Tensor:
        return random_weight(n, k).to(torch.bfloat16)

    layers = [
        (
            plain(QKV, HIDDEN),
            plain(HIDDEN, HIDDEN),
            plain(2 * INTERMEDIATE, HIDDEN),
            plain(HIDDEN, INTERMEDIATE),
        )
        for _ in range(LAYERS)
    ]
    head = plain(VOCABULARY, HIDDEN)

    def step(b: Buffers) -> None:
        for qkv, output, gate_up, down in layers:
            F.linear(b.hidden, qkv)
            F.linear(b.hidden, output)
            F.linear(b.hidden, gate_up)
            F.linear(b.inner, down)
        F.linear(b.hidden[: len(b.logits)], head)

    return step, 2 * PARAMETERS


def fastest(action: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run, of at least three."""
    action()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(seconds: float) -> float:
    """GB/s of reading 256 MiB."""
    numbers = torch.ones(64 << 20)
    return numbers.numel() * numbers.element_size() / fastest(numbers.sum, seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,16,32,64,256,512")
    parser.add_argument("--kinds", default="bf16,q8_0,q4_1")
    parser.add_argument("--isa", default="AMX", choices=[isa.name for isa in Isa])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure")
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    library = load_native(options.cache_dir)
    if library is None:
        parser.exit(1)
    with library.limited_to(Isa[options.isa]):
        report(options, library.isa.name, NativeLinear(library))


def report(options: argparse.Namespace, isa: str, ops: NativeLinear) -> None:
    steps = {f"{isa} {kind}": native_step(kind, ops) for kind in options.kinds.split(",")}
    if not options.no_torch:
        steps["torch bf16"] = torch_step()
    print(f"{torch.get_num_threads()} threads of torch, read {read_bandwidth(0.5):.0f} GB/s")
    print(f"{'rows':>5} {'kind':14} {'ms':>8} {'GB/s':>7} {'GFLOP/s':>8}")
    for rows in map(int, options.rows.split(",")):
        buffers = Buffers.of(rows)
        flops = 2 * (rows * (PARAMETERS - HIDDEN * VOCABULARY))
        flops += 2 * len(buffers.logits) * HIDDEN * VOCABULARY
        for name, (step, weight_bytes) in steps.items():
            taken = fastest(lambda step=step, buffers=buffers: step(buffers), options.seconds)
            rates = f"{weight_bytes / taken / 1e9:7.1f} {flops / taken / 1e9:8.0f}"
            print(f"{rows:5} {name:14} {taken * 1e3:8.2f} {rates}", flush=True)


if __name__ == "__main__":
    main()
