"""Compiles the kernels for a card that is not here, and prints what each version takes of it.

    python tests/gpu/compile_kernels.py [--capability 90] [--dtypes bf16,fp16,fp32] [--every 1]

It needs Triton and its own assembler, no driver and no GPU: the functions of the room are called
with tensors of the CPU, and where they would launch a kernel it is compiled instead. One JSON line
a version: shared memory (bytes), registers of a thread, bytes of a thread that spilled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backend_src")]
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.interpreter.all_cases import CASES  # noqa: E402
from tests.interpreter.case import Case, dtype_name  # noqa: E402

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")


class Compiler:
    """Stands in for ``JITFunction.run``: compiles each version once, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self._seen: set[str] = set()
        self.versions: list[dict[str, Any]] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants, attributes = self._described(kernel, values)
        version = repr((kernel.__name__, signature, constants, sorted(options.items())))
        if version in self._seen:
            return
        self._seen.add(version)
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=self._target, options=options)
        registers, spilled = resources(compiled.asm["cubin"])
        self.versions.append(
            {
                "kernel": kernel.__name__,
                "constants": {kernel.arg_names[i]: value for (i,), value in constants.items()},
                **options,
                "shared_memory": compiled.metadata.shared,
                "registers": registers,
                "spilled": spilled,
            }
        )

    def _described(
        self, kernel: Any, values: dict[str, Any]
    ) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
        """What Triton would make of the arguments: types, constants and multiples of 16."""
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            specialises = not parameter.do_not_specialize
            if parameter.is_constexpr or (specialises and type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(i,)] = value
                continue
            signature[parameter.name] = type_of(value)
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if specialises and isinstance(number, int) and number % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return signature, constants, attributes


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float)
    return "fp32"


def resources(binary: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the disassembler reads them from the binary."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1)
    return int(fields["REG"]), int(fields["LOCAL"]) + int(fields["STACK"])


def compile_cases(cases: Iterable[Case], capability: int) -> list[dict[str, Any]]:
    """Every version that the cases would launch."""
    compiler = Compiler(capability)
    triton.JITFunction.run = lambda kernel, *args, **named: compiler.run(kernel, *args, **named)
    for case in cases:
        case.run(torch.device("cpu"))  # what it returns is of results that nobody computed
    return compiler.versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90, help="80, 86, 89, 90, 100")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32")
    parser.add_argument("--every", type=int, default=1, help="only each so manieth case")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    cases = [case for case in CASES if dtype_name(case.dtype) in dtypes]
    for version in compile_cases(cases[:: arguments.every], arguments.capability):
        print(json.dumps(version, default=str))


if __name__ == "__main__":
    main()
