"""The physical limits of the machine at this moment: how fast it reads and how fast it multiplies.

    python -m tests.benchmarks.compare.limits THREADS FOLDER

Prints one JSON object. Runs in a process of its own, so that nothing of it rests in memory while
systems are measured. The read rate is that of a small C++ loop over READ_BYTES of memory (FOLDER
keeps it compiled); without a compiler it is torch's sum, which is slower. It is the rate of memory
however small the weights are: over as few bytes as those of a small model the loop would be served
by the cache that the cores share (300 MB where this was first measured). The rates of
multiplication are the best that torch reaches on the shapes below; of int8, where the CPU has no
AMX, it is that of the instructions in another C++ loop, which no product of matrices can pass:
torch has no fast product of int8 for every CPU.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.native.cpu import may_have

SECONDS = 0.4
READ_BYTES = 512 << 20
"""More than the caches of most machines hold."""
SHAPES = ((512, 576, 1536), (512, 1024, 1024), (1024, 2048, 2048))
"""Rows, inner size and columns; the first is the embedded model's."""
ALIGNMENT = 64
STEPS = 1 << 20
"""Of the loop over products of bytes: a few milliseconds."""


@dataclass(frozen=True)
class Limits:
    """Of the whole machine, all threads."""

    read_bytes: float
    """Bytes a second."""
    fp32_flops: float
    """Multiplications and additions a second; so are the next two."""
    bf16_flops: float
    int8_ops: float

    def flops_for(self, dtype: str) -> float:
        """The most that weights of this dtype can be multiplied with: bf16 may be expanded to fp32
        (a CPU without instructions for bf16 is faster so), int8 and int4 blocks to either."""
        if dtype == "fp32":
            return self.fp32_flops
        floats = max(self.fp32_flops, self.bf16_flops)
        return floats if dtype == "bf16" else max(floats, self.int8_ops)


def measure_limits(threads: int, folder: Path) -> Limits:
    """Measures in a process of its own. Raises RuntimeError where that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.compare.limits", str(threads), str(folder)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the limits could not be measured: {done.stderr[-300:]}")
    return Limits(**json.loads(done.stdout))


def fastest(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """Seconds of the fastest of the calls that fit."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


class MemoryReader:
    """READ_BYTES of memory and the fastest way to read them that there is here."""

    def __init__(self, threads: int, folder: Path) -> None:
        """``folder`` keeps the compiled loop."""
        self._numbers = _aligned_ones(READ_BYTES // 8)
        library = _compiled("read_rate", folder)
        if library is None:
            import torch

            self._read: Callable[[], object] = torch.from_numpy(self._numbers).sum
        else:
            library.sum_of_lines.restype = ctypes.c_int64
            library.sum_of_lines.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
            place = ctypes.c_void_p(self._numbers.ctypes.data)
            self._read = partial(library.sum_of_lines, place, self._numbers.size, threads)

    def rate(self, seconds: float = SECONDS) -> float:
        """Bytes a second, the best of ``seconds``."""
        return float(self._numbers.nbytes / fastest(self._read, seconds))


def _aligned_ones(count: int) -> npt.NDArray[np.int64]:
    room = np.ones(count + ALIGNMENT // 8, dtype=np.int64)
    skip = -room.ctypes.data % ALIGNMENT // 8
    return room[skip : skip + count]


def _compiled(name: str, folder: Path) -> Any:
    """A loop of this folder as a library; None without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    target = folder / f"{name}.so"
    if not target.exists():
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        source = Path(__file__).with_name(f"{name}.cpp")
        subprocess.run([compiler, *flags, "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


def int8_rate(threads: int, folder: Path, seconds: float = SECONDS) -> float:
    """Multiplications and additions a second."""
    products = byte_product_rate(threads, folder, seconds)
    if products and not may_have("amx"):
        return products
    return max(products, multiply_rate("int8", seconds))


def byte_product_rate(threads: int, folder: Path, seconds: float = SECONDS) -> float:
    """Of the CPU's vector instructions, all threads; 0: they or a compiler are not known."""
    library = _compiled("byte_products", folder)
    if library is None:
        return 0.0
    library.num_operations.restype = ctypes.c_int64
    for function in (library.num_operations, library.multiply_bytes):
        function.argtypes = [ctypes.c_int64, ctypes.c_int]
    operations = int(library.num_operations(STEPS, threads))
    if not operations:
        return 0.0
    return operations / fastest(partial(library.multiply_bytes, STEPS, threads), seconds)


def multiply_rate(kind: str, seconds: float = SECONDS) -> float:
    """The best of the shapes, ``seconds`` for each; ``kind``: fp32, bf16 or int8."""
    import torch

    best = 0.0
    for rows, inner, columns in SHAPES:
        if kind == "int8":
            a = torch.ones(rows, inner, dtype=torch.int8)
            b = torch.ones(inner, columns, dtype=torch.int8)
            taken = fastest(partial(torch._int_mm, a, b), seconds)
        else:
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
            taken = fastest(partial(torch.nn.functional.linear, a, b), seconds)
        best = max(best, 2 * rows * inner * columns / taken)
    return best


def main() -> None:
    import torch

    threads, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(threads)
    limits = Limits(
        read_bytes=MemoryReader(threads, folder).rate(),
        fp32_flops=multiply_rate("fp32"),
        bf16_flops=multiply_rate("bf16"),
        int8_ops=int8_rate(threads, folder),
    )
    print(json.dumps(asdict(limits)))


if __name__ == "__main__":
    main()
