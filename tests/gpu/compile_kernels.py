"""Compiles the kernels for a card that is not here, and prints what each version takes of it.

    python tests/gpu/compile_kernels.py [--capability 90] [--dtypes bf16,fp16,fp32] [--every 1]
    python tests/gpu/compile_kernels.py --launches defaults|candidates [...]

The cases of tests/interpreter, or attention with the launches it has without and during tuning.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backend_src")]
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inflight.kernels.attention import AttentionPlan, attend  # noqa: E402
from inflight.kernels.launch import default_launches  # noqa: E402
from inflight.kernels.tuning import CONTEXT_CANDIDATES, GENERATION_CANDIDATES  # noqa: E402
from tests.interpreter.all_cases import CASES  # noqa: E402
from tests.interpreter.attention_cases import AttentionShape, make_iteration  # noqa: E402
from tests.interpreter.case import DTYPES, Case, dtype_name  # noqa: E402

CPU = torch.device("cpu")

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages")
FP8_CAPABILITY = 89
"""The first that converts fp8 (e4m3)."""


@dataclass(frozen=True, slots=True)
class Version:
    """What Triton compiles once: a kernel for types, constants, alignments and options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], Any]
    options: dict[str, int]

    @property
    def needs_fp8(self) -> bool:
        names = self.kernel.arg_names
        return any(names[i] == "HAS_SCALES" and value for (i,), value in self.constants.items())

    @property
    def key(self) -> str:
        facts = (self.signature, self.constants, self.attributes, sorted(self.options.items()))
        return f"{self.kernel.__name__}{facts}"

    def compiled(self, capability: int) -> dict[str, Any]:
        """The row that is printed of it."""
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=self.options)
        registers, spilled = resources(compiled.asm["cubin"])
        names = self.kernel.arg_names
        return {
            "kernel": self.kernel.__name__,
            "constants": {names[i]: value for (i,), value in self.constants.items()},
            **self.options,
            "shared_memory": compiled.metadata.shared,
            "registers": registers,
            "spilled": spilled,
        }


def version_of(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> Version:
    """As Triton tells versions apart: by types, ones, and multiples of 16."""
    options = {name: named[name] for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    version = Version(kernel, {}, {}, {}, options)
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        specialises = not parameter.do_not_specialize
        if parameter.is_constexpr or (specialises and type(value) is int and value == 1):
            version.signature[parameter.name] = "constexpr"
            version.constants[(i,)] = value
            continue
        version.signature[parameter.name] = type_of(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if specialises and isinstance(number, int) and number % 16 == 0:
            version.attributes[(i,)] = [["tt.divisibility", 16]]
    return version


@contextmanager
def recorded() -> Iterator[dict[str, Version]]:
    """Launches inside become versions, by their keys; nothing runs."""
    versions: dict[str, Version] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        version = version_of(kernel, args, named)
        versions.setdefault(version.key, version)

    original = triton.JITFunction.run
    triton.JITFunction.run = run
    try:
        yield versions
    finally:
        triton.JITFunction.run = original


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


def run_cases(dtypes: Sequence[torch.dtype], every: int) -> None:
    of_kernel: dict[str, list[Case]] = {}
    for case in CASES:
        of_kernel.setdefault(case.kernel, []).append(case)
    for every_case in of_kernel.values():
        # What has none of these dtypes is compiled as it is: sampling is fp32 alone.
        cases = [case for case in every_case if case.dtype in dtypes] or every_case
        for case in cases[::every]:
            case.run(CPU)  # what it returns is of results that nobody computed


def run_launches(dtypes: Sequence[torch.dtype], *, candidates: bool) -> None:
    """Attention of heads of 64, 128 and 256, split and not."""
    for dtype, head_dim in product(dtypes, (64, 128, 256)):
        default = default_launches(head_dim, dtype)
        launches = [default]
        if candidates:
            launches = [replace(default, context=launch) for launch in CONTEXT_CANDIDATES]
            launches += [replace(default, generation=launch) for launch in GENERATION_CANDIDATES]
        shape = AttentionShape(heads=(32, 8), head_dim=head_dim, tokens_per_block=64)
        iteration = make_iteration(dtype, shape, CPU)
        for some in launches:
            plan = AttentionPlan.allocate(
                num_heads=32, num_kv_heads=8, head_dim=head_dim, launches=some, device=CPU
            )
            for wanted in (1, 512):
                rows = replace(iteration.rows, longest=4096)
                attend(
                    iteration.query,
                    iteration.cache,
                    rows,
                    iteration.rules,
                    torch.empty_like(iteration.query),
                    replace(plan, wanted_programs=wanted),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90, help="80, 86, 89, 90, 100")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32")
    parser.add_argument("--every", type=int, default=1, help="only each N-th case of a kernel")
    parser.add_argument("--launches", choices=("defaults", "candidates"))
    options = parser.parse_args()
    dtypes = [dtype for dtype in DTYPES if dtype_name(dtype) in options.dtypes.split(",")]
    with recorded() as versions:
        if options.launches:
            run_launches(dtypes, candidates=options.launches == "candidates")
        else:
            run_cases(dtypes, options.every)
    for version in versions.values():
        if version.needs_fp8 and options.capability < FP8_CAPABILITY:
            continue
        print(json.dumps(version.compiled(options.capability), default=str), flush=True)


if __name__ == "__main__":
    main()
