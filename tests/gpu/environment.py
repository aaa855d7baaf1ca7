"""Stage: which machine this is, and whether all that the other stages import is there."""

from __future__ import annotations

import argparse
import importlib
import platform
from pathlib import Path

from tests.gpu.rows import Outcome, Row, emit

CARD = "card"
"""``what`` of the row whose ``note`` names the card; a run without one names its processor."""

NEEDED = ("torch", "transformers", "numpy", "pydantic", "yaml", "tokenizers", "safetensors")
OPTIONAL = ("triton",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    emit(processor() if options.cpu else card())
    for name in NEEDED:
        emit(module(name, outcome=Outcome.FAILED))
    for name in OPTIONAL:
        emit(module(name, outcome=Outcome.SKIPPED))
    emit(our_package())


def card() -> Row:
    """Name, memory, multiprocessors, compute capability, driver."""
    import torch

    from tests.gpu.card import why_no_card

    reason = why_no_card()
    if reason is not None:
        return Row(what=CARD, outcome=Outcome.FAILED, note=reason)
    device = torch.cuda.get_device_properties(0)
    note = (
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
        f"{device.multi_processor_count} multiprocessors, "
        f"compute capability {device.major}.{device.minor}, CUDA {torch.version.cuda}"
    )
    return Row(what=CARD, note=note)


def processor() -> Row:
    """Of the CPU stand-in."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return Row(what=CARD, note=f"no card: {model}")


def module(name: str, *, outcome: Outcome) -> Row:
    """Its version; ``outcome``: what it means that it cannot be imported."""
    try:
        found = importlib.import_module(name)
    except Exception as error:  # some raise anything when their libraries do not fit
        return Row(what=f"import {name}", outcome=outcome, note=f"{type(error).__name__}: {error}")
    version = str(getattr(found, "__version__", ""))
    return Row(what=f"import {name}", note=version)


def our_package() -> Row:
    """Everything that serves, imported."""
    try:
        import inflight.executor
        import inflight.model.factory  # noqa: F401
    except ImportError as error:
        return Row(what="import inflight", outcome=Outcome.FAILED, note=str(error))
    return Row(what="import inflight", note=inflight.__version__)


if __name__ == "__main__":
    main()
