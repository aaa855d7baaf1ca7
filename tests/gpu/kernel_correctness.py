"""Stage: every kernel against its torch reference, on the card; compiled by several processes.

    python -m tests.gpu.kernel_correctness [--every N]
    TRITON_INTERPRET=1 python -m tests.gpu.kernel_correctness --cpu [--every N]

The cases are those of tests/interpreter; with --cpu some of them run under the interpreter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from inflight.errors import one_line
from tests.gpu.card import is_skipped
from tests.gpu.rows import Outcome, Row, emit
from tests.interpreter.all_cases import CASES
from tests.interpreter.case import dtype_name

MOST_WORKERS = 8
"""Compiling takes most of the time; each process has a context of its own on the card."""
CPU_SHARE = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--every", type=int, help="run only each N-th case")
    options = parser.parse_args()
    if is_skipped("kernels", on_cpu=options.cpu):
        return
    every = options.every or (CPU_SHARE if options.cpu else 1)
    chosen = range(0, len(CASES), every)
    print(f"{len(chosen)} of {len(CASES)} cases", flush=True)
    errors = dict(zip(chosen, _errors(chosen, "cpu" if options.cpu else "cuda"), strict=True))
    for row in rows(errors):
        emit(row)


def _errors(chosen: Iterable[int], device: str) -> Iterator[float | str]:
    """Of each case: its error in units of what is allowed, or why it did not run."""
    if device == "cpu":
        return (run_case(i, device) for i in chosen)
    workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 1))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    chosen = list(chosen)
    return pool.map(run_case, chosen, [device] * len(chosen))


def run_case(index: int, device: str) -> float | str:
    try:
        return CASES[index].run(torch.device(device))
    except Exception as error:
        return one_line(error)


def rows(errors: dict[int, float | str]) -> list[Row]:
    """One for each kernel and dtype, and one for each case that is wrong."""
    largest: dict[str, list[float]] = {}
    failed: list[Row] = []
    for i, error in errors.items():
        case = CASES[i]
        of_kind = largest.setdefault(f"{case.kernel} {dtype_name(case.dtype)}", [])
        if isinstance(error, str) or error > 1.0:
            reason = error if isinstance(error, str) else f"{error:.3g} of the allowed error"
            failed.append(Row(what=case.name, outcome=Outcome.FAILED, note=f"{reason}"[:160]))
        else:
            of_kind.append(error)
    passed = [
        Row(what=what, note=f"{len(of)} shapes, largest error {max(of):.2f} of the allowed")
        for what, of in largest.items()
        if of
    ]
    return passed + failed


if __name__ == "__main__":
    main()
