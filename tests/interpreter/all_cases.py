"""Every case of every kernel, and the tables of what they cover."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.interpreter.attention_cases import attention_cases
from tests.interpreter.case import Case, dtype_name
from tests.interpreter.expert_cases import expert_cases
from tests.interpreter.layer_cases import layer_cases
from tests.interpreter.sampling_cases import sampling_cases
from tests.interpreter.storage_cases import storage_cases

HEAD = """# What the GPU kernels are held to

Written by `python -m tests.interpreter.all_cases docs/gpu_kernels.md`; a test keeps it current.

Each line is a kernel of `backend_src/inflight/kernels` on one shape. In every dtype named it equals
a torch reference in float64, and what samples equals the host's sampler: under Triton's interpreter
(`bash scripts/test -m interpreter`), and on a card, with the same cases, in
`python -m tests.gpu.kernel_correctness`.

Outputs, unused slots and the room for partial sums are NaN before the call, block tables are
random, and what a kernel must not touch is compared with what it was. Each dtype is held to the
rounding of its own results. The interpreter's products of bf16 are wrong, so there products of fp16
and bf16 are taken in fp32; it also cuts bf16 off where a card rounds it.
"""

CASES: tuple[Case, ...] = (
    *layer_cases(),
    *expert_cases(),
    *attention_cases(),
    *storage_cases(),
    *sampling_cases(),
)


def coverage_lines(cases: Iterable[Case]) -> list[str]:
    """One line for each kernel and shape, with its dtypes: a Markdown table."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        dtypes.setdefault((case.kernel, case.shape), []).append(dtype_name(case.dtype))
    rows = [f"| {kernel} | {shape} | {' '.join(of)} |" for (kernel, shape), of in dtypes.items()]
    return ["| kernel | shape | dtypes |", "|---|---|---|", *rows]


def summary_lines(cases: Iterable[Case]) -> list[str]:
    """One line for each kernel, with every dtype and size of its cases and their number: a Markdown
    table."""
    of_kernels: dict[str, list[Case]] = {}
    for case in cases:
        of_kernels.setdefault(case.kernel, []).append(case)
    lines = ["| kernel | dtypes | sizes | cases |", "|---|---|---|---|"]
    for kernel, of in of_kernels.items():
        dtypes = " ".join(dict.fromkeys(dtype_name(case.dtype) for case in of))
        lines.append(f"| {kernel} | {dtypes} | {_sizes_of(of)} | {len(of)} |")
    return lines


def _sizes_of(cases: Iterable[Case]) -> str:
    numbers: dict[str, set[int]] = {}
    for case in cases:
        for name, size in case.sizes.items():
            numbers.setdefault(name, set()).add(size)
    words = (f"{name} {', '.join(map(str, sorted(of)))}" for name, of in numbers.items())
    return "; ".join(words)


def page() -> str:
    """docs/gpu_kernels.md."""
    return "\n".join((HEAD, *coverage_lines(CASES), ""))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
