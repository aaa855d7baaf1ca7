"""The real FlashInfer behind our adapter, on a machine with a card that has it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from inflight.model.device.flashinfer_attention import missing_reason  # noqa: E402
from tests.gpu.card import why_no_card  # noqa: E402
from tests.interpreter.case import Case  # noqa: E402
from tests.interpreter.flashinfer_cases import flashinfer_cases  # noqa: E402

REASON = why_no_card() or missing_reason()

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"{REASON}"),
]


@pytest.mark.parametrize("case", tuple(flashinfer_cases()), ids=lambda case: case.name)
def test_equals_the_torch_reference(case: Case) -> None:
    assert case.run(torch.device("cuda")) <= 1.0
