"""Whether there is a card: what every stage that computes on one asks first."""

from __future__ import annotations

import torch

from tests.gpu.rows import Outcome, Row, emit


def why_no_card() -> str | None:
    """None: torch sees one."""
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def is_skipped(what: str, *, on_cpu: bool) -> bool:
    """Whether a stage has nothing to compute on; its row ``what`` has been emitted then."""
    reason = None if on_cpu else why_no_card()
    if reason is not None:
        emit(Row(what=what, outcome=Outcome.SKIPPED, note=reason))
    return reason is not None
