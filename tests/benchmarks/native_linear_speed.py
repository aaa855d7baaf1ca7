"""Milliseconds of all linears of one iteration, native against torch, and what bounds them.

::

    OMP_NUM_THREADS=2 python -m tests.benchmarks.native_linear_speed [--rows 1,8,32] [--kinds bf16]

The shapes are SmolLM2-135M's: 30 layers of query-key-value, output, gate-and-up, down, and the
head. Each layer has weights of its own, so that they come from memory as in service. What is
compared takes turns (A B A B), and a figure is the fastest of the turns: other work on the machine
can only add to it. "of read" is the share of the rate at which the same run reads memory, "of
matmul" that of torch's product of large matrices, in fp32 or bf16 as is faster
(``compare/limits.py``). ``--other FILE`` takes turns with a library that was built from other
sources, as of an earlier commit. ``--calls`` shows instead what a call costs on the way to the
kernels, by ctypes and as a torch custom op.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native.library import Isa, NativeLibrary, load_native
from inflight.native.linear import NativeLinear
from inflight.native.packed import PackedLinear, WeightKind, pack_gate_up, pack_linear
from inflight.native.torch_ops import register_torch_ops
from tests.benchmarks.compare.limits import MemoryReader, multiply_rate

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
    weight: Tensor = torch.randn(n, k) / k**0.5
    return weight


Layer = tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]
Step = Callable[[Buffers], None]


def weights_of(kind: WeightKind) -> tuple[list[Layer], PackedLinear]:
    """The layers' query-key-value, output, gate-and-up and down, and the head."""

    def plain(n: int, k: int) -> PackedLinear:
        return pack_linear(random_weight(n, k), None, kind)

    def gate_up() -> PackedLinear:
        gate, up = random_weight(INTERMEDIATE, HIDDEN), random_weight(INTERMEDIATE, HIDDEN)
        return pack_gate_up(gate, up, kind)

    layers = [
        (plain(QKV, HIDDEN), plain(HIDDEN, HIDDEN), gate_up(), plain(HIDDEN, INTERMEDIATE))
        for _ in range(LAYERS)
    ]
    return layers, plain(VOCABULARY, HIDDEN)


def native_step(layers: list[Layer], head: PackedLinear, ops: NativeLinear) -> tuple[Step, int]:
    """One iteration's linears, and the bytes of weights that it reads."""

    def step(b: Buffers) -> None:
        for qkv, output, gate_up, down in layers:
            ops(b.hidden, qkv, b.qkv)
            ops(b.hidden, output, b.residual, accumulate=True)
            ops.gate_up(b.hidden, gate_up, b.inner, "silu")
            ops(b.inner, down, b.residual, accumulate=True)
        ops.logits(b.hidden[: len(b.logits)], head, b.logits)

    everything = [packed for layer in layers for packed in layer] + [head]
    return step, sum(packed.data.numel() for packed in everything)


def torch_step() -> tuple[Step, int]:
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


def alternated(actions: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of each action's fastest turn, of at least four.

    Every other turn goes backwards: what follows an action on the same weights is faster, as if it
    found some of them in the cache that the cores share.
    """
    for action in actions.values():
        action()
    best = dict.fromkeys(actions, float("inf"))
    turns, end = 0, time.perf_counter() + seconds * len(actions)
    while turns < 4 or time.perf_counter() < end:
        for name, action in list(actions.items())[:: -1 if turns % 2 else 1]:
            start = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - start)
        turns += 1
    return best


def limits(reader: MemoryReader, seconds: float) -> tuple[float, float]:
    """GB/s of reading memory, and GFLOP/s of large matrices in fp32 or bf16."""
    product = max(multiply_rate(dtype, seconds / 3) for dtype in ("fp32", "bf16"))
    return reader.rate(seconds) / 1e9, product / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,8,16,32,64,256,512")
    parser.add_argument("--kinds", default="bf16,q8_0,q4_1")
    parser.add_argument("--isa", default="AMX", choices=[isa.name for isa in Isa])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure")
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--other", type=Path, help="a library to take turns with")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    library = load_native(options.cache_dir, every_isa=True)
    if library is None:
        parser.exit(1)
    libraries = {"": library}
    if options.other:
        libraries["other "] = NativeLibrary(options.other)
    with ExitStack() as limited:
        for one in libraries.values():
            one.set_num_threads(torch.get_num_threads())
            limited.enter_context(one.limited_to(Isa[options.isa]))
        if options.calls:
            report_calls(library, options.seconds)
        else:
            folder = Path(limited.enter_context(tempfile.TemporaryDirectory()))
            reader = MemoryReader(torch.get_num_threads(), folder)
            report(options, library.isa.name, libraries, reader)


def report(
    options: argparse.Namespace,
    isa: str,
    libraries: dict[str, NativeLibrary],
    reader: MemoryReader,
) -> None:
    ops = {name: NativeLinear(library) for name, library in libraries.items()}
    steps = {}
    for kind in options.kinds.split(","):
        layers, head = weights_of(kind)
        for name, linear in ops.items():
            steps[f"{name}{isa} {kind}"] = native_step(layers, head, linear)
    if not options.no_torch:
        steps["torch bf16"] = torch_step()
    print(f"{torch.get_num_threads()} threads")
    print(
        f"{'rows':>5} {'kind':20}{'ms':>9}{'GB/s':>7}{'of read':>9}{'GFLOP/s':>9}{'of matmul':>10}"
    )
    for rows in map(int, options.rows.split(",")):
        read, product = limits(reader, options.seconds)
        buffers = Buffers.of(rows)
        flops = 2 * (rows * (PARAMETERS - HIDDEN * VOCABULARY))
        flops += 2 * len(buffers.logits) * HIDDEN * VOCABULARY
        best = alternated(
            {name: partial(step, buffers) for name, (step, _) in steps.items()}, options.seconds
        )
        for name, (_, weight_bytes) in steps.items():
            taken = best[name]
            bytes_rate, flops_rate = weight_bytes / taken / 1e9, flops / taken / 1e9
            print(
                f"{rows:5} {name:20}{taken * 1e3:9.2f}{bytes_rate:7.1f}{bytes_rate / read:9.0%}"
                f"{flops_rate:9.0f}{flops_rate / product:10.0%}",
                flush=True,
            )


def report_calls(library: NativeLibrary, seconds: float) -> None:
    register_torch_ops(library)
    library.set_num_threads(1)
    linear, op = NativeLinear(library), torch.ops.inflight.linear.default
    packed = pack_linear(random_weight(32, 32), None, "bf16")
    x, y = torch.randn(1, 32).bfloat16(), torch.empty(1, 32, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "ctypes": lambda: linear(x, packed, y),
        "ctypes, new result": lambda: linear(x, packed, x.new_empty(1, 32)),
        "custom op": lambda: op(x, packed.data, packed.bias, "bf16", 32),
    }
    repeated = {name: partial(repeat, call, 100) for name, call in calls.items()}
    for name, taken in alternated(repeated, seconds).items():
        print(f"{name:20}{taken / 100 * 1e6:7.1f} us")


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


if __name__ == "__main__":
    main()
