"""Each kernel equals its torch reference under Triton's interpreter, on every dtype and shape."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.interpreter.all_cases import CASES  # noqa: E402
from tests.interpreter.case import Case  # noqa: E402

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_torch_reference(case: Case, passed: list[object]) -> None:
    assert case.run(torch.device("cpu")) <= 1.0
    passed.append(case)
