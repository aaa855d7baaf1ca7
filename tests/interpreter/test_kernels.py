"""Each kernel equals its torch reference under Triton's interpreter, on every dtype and shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.interpreter.all_cases import CASES, page  # noqa: E402
from tests.interpreter.case import Case  # noqa: E402

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_torch_reference(case: Case, passed: list[object]) -> None:
    assert case.run(torch.device("cpu")) <= 1.0
    passed.append(case)


def test_the_page_of_what_is_covered_is_current() -> None:
    assert (ROOT / "docs" / "gpu_kernels.md").read_text() == page()
