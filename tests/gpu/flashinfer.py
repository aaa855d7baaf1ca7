"""Stage: FlashInfer behind our adapter, against the reference and beside our kernels.

    bash tests/gpu/run.sh --only environment flashinfer
    python -m tests.gpu.flashinfer [--tune FILE]

FlashInfer is optional. In the whole suite it gets what the other stages left over, and ends itself
then: unless it was installed with compiled kernels it compiles each kind of rules for minutes.
``--tune`` measures the launches of our kernels first, and keeps them in FILE.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from inflight.errors import one_line
from inflight.kernels.launch import AttentionLaunches
from inflight.kernels.tuning import launches_for, tune
from inflight.model.device.flashinfer_attention import missing_reason
from tests.gpu.budget import skip_rest_in_time
from tests.gpu.card import why_no_card
from tests.gpu.kernel_speed import ceiling, measured, seconds
from tests.gpu.kernel_works import (
    LLAMA,
    Sizes,
    attention,
    attention_shape,
    copy_work,
    flashinfer,
    product_work,
)
from tests.gpu.rows import Outcome, Row, emit
from tests.interpreter.case import Case
from tests.interpreter.flashinfer_cases import KERNEL, flashinfer_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="there is nothing of it to see")
    parser.add_argument("--tune", type=Path, metavar="FILE")
    options = parser.parse_args()
    reason = "it computes on a card only" if options.cpu else why_no_card() or missing_reason()
    if reason is not None:
        emit(Row(what=KERNEL, outcome=Outcome.SKIPPED, note=reason))
        return
    skip_rest_in_time(KERNEL)
    torch.manual_seed(1)
    device, shape = torch.device("cuda"), attention_shape(LLAMA)
    if options.tune:
        tune(options.tune, shape, device)
    for row in equality(flashinfer_cases(), device):
        emit(row)
    for row in speed(LLAMA, launches_for(options.tune, shape, device), device):
        emit(row)


def equality(cases: Iterable[Case], device: torch.device) -> Iterator[Row]:
    for case in cases:
        try:
            error = case.run(device)
        except Exception as reason:
            yield Row(what=case.name, outcome=Outcome.FAILED, note=one_line(reason))
            continue
        outcome = Outcome.OK if error <= 1.0 else Outcome.FAILED
        yield Row(what=case.name, outcome=outcome, note=f"{error:.3g} of the allowed error")


def speed(sizes: Sizes, launches: AttentionLaunches, device: torch.device) -> Iterator[Row]:
    copy = ceiling(copy_work(sizes, device), device)
    product = ceiling(product_work(sizes, device), device)
    pairs = zip(flashinfer(sizes, device), attention(sizes, launches, device), strict=True)
    try:
        for theirs, ours in pairs:
            row = measured(theirs, copy, product, device)
            share = seconds(theirs.run, device) / seconds(ours.run, device)
            yield replace(row, target=None, note=f"{share:.2f} of our kernels' time")
    except Exception as reason:
        yield Row(what=KERNEL, outcome=Outcome.FAILED, note=one_line(reason))


if __name__ == "__main__":
    main()
