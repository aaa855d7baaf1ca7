"""Stage: every kernel against its torch reference, on the card; compiled by several processes.

    python -m tests.gpu.kernel_correctness [--every N]
    TRITON_INTERPRET=1 python -m tests.gpu.kernel_correctness --cpu [--every N]

The cases are those of tests/interpreter; with --cpu some of them run under the interpreter. What is
wrong is said as it is found, and where time runs out what has been found by then still counts.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

import torch

from inflight.errors import one_line
from tests.gpu.budget import seconds_left
from tests.gpu.card import is_skipped
from tests.gpu.rows import Outcome, Row, emit
from tests.interpreter.all_cases import CASES
from tests.interpreter.case import dtype_name

MOST_WORKERS = 15
"""Compiling takes most of the time; each process has a context of its own on the card."""
CPU_SHARE = 6
LAST_SECONDS = 4.0
"""Of the stage, kept for what there is to say."""

Found = float | str | None
"""Of a case: its error in units of what is allowed; why it failed; None: it was not run, since an
earlier one has left the process without its card."""

_is_lost = False
"""The context of this process on the card does nothing any more."""


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
    found: dict[int, Found] = {}
    for index, result in _results(chosen, "cpu" if options.cpu else "cuda"):
        found[index] = result
        if (row := failure(index, result)) is not None:
            emit(row)
    for row in (*passed(found), *left_out(chosen, found)):
        emit(row)
    if len(found) < len(chosen):
        os._exit(0)  # the suite ends the processes that are still busy


def _results(chosen: Iterable[int], device: str) -> Iterator[tuple[int, Found]]:
    """As they come, for as long as there is time."""
    if device == "cpu":
        yield from ((i, run_case(i, device)) for i in chosen)
        return
    workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 1))
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(workers, mp_context=context)
    index_of = {pool.submit(run_case, i, device): i for i in chosen}
    seconds = seconds_left() - LAST_SECONDS
    try:
        limit = None if math.isinf(seconds) else max(0.0, seconds)
        for future in futures.as_completed(index_of, limit):
            yield index_of[future], future.result()
    except BrokenProcessPool as error:
        emit(Row(what="a process of the cases", outcome=Outcome.FAILED, note=one_line(error)[:160]))
    except futures.TimeoutError:
        pool.shutdown(wait=False, cancel_futures=True)


def run_case(index: int, device: str) -> Found:
    global _is_lost
    if _is_lost:
        return None
    try:
        return CASES[index].run(torch.device(device))
    except Exception as error:
        _is_lost = device == "cuda" and not _answers()
        return one_line(error)


def _answers() -> bool:
    """Whether the card still does what this process asks: after a wrong access it never does."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def failure(index: int, found: Found) -> Row | None:
    """None: the case passed, or was not run."""
    if found is None or (isinstance(found, float) and found <= 1.0):
        return None
    reason = found if isinstance(found, str) else f"{found:.3g} of the allowed error"
    return Row(what=CASES[index].name, outcome=Outcome.FAILED, note=reason[:160])


def passed(found: dict[int, Found]) -> Iterator[Row]:
    """One row for each kernel and dtype, of the cases that passed."""
    errors: dict[str, list[float]] = {}
    for i, error in found.items():
        if isinstance(error, float) and error <= 1.0:
            kind = f"{CASES[i].kernel} {dtype_name(CASES[i].dtype)}"
            errors.setdefault(kind, []).append(error)
    for what, of in sorted(errors.items()):
        note = f"{len(of)} shapes, largest error {max(of):.2f} of the allowed"
        yield Row(what=what, note=note)


def left_out(chosen: Iterable[int], found: dict[int, Found]) -> Iterator[Row]:
    """A row for cases that time ran out for, and one for those whose process lost its card."""
    late = [i for i in chosen if i not in found]
    lost = [i for i, result in found.items() if result is None]
    if late:
        note = f"no time for {len(late)} cases, the first of them {CASES[late[0]].name}"
        yield Row(what="cases not run", outcome=Outcome.SKIPPED, note=note)
    if lost:
        note = f"{len(lost)} cases behind one that lost the card, in its process"
        yield Row(what="cases not run", outcome=Outcome.SKIPPED, note=note)


if __name__ == "__main__":
    main()
