"""The stage that holds every kernel to its reference on a card: what it says of the cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu import kernel_correctness as stage  # noqa: E402
from tests.gpu.rows import Outcome  # noqa: E402
from tests.interpreter.all_cases import CASES  # noqa: E402

pytestmark = pytest.mark.interpreter


def test_wrong_cases_are_rows_and_right_ones_are_counted_by_kernel() -> None:
    kind = [i for i, case in enumerate(CASES) if case.kernel == "rms_norm"][:3]
    found: dict[int, stage.Found] = {kind[0]: 0.5, kind[1]: 1.25, kind[2]: "no memory"}
    assert stage.failure(kind[0], 0.5) is None and stage.failure(kind[0], None) is None
    failures = [stage.failure(i, found[i]) for i in kind[1:]]
    assert [row and (row.what, row.outcome, row.note) for row in failures] == [
        (CASES[kind[1]].name, Outcome.FAILED, "1.25 of the allowed error"),
        (CASES[kind[2]].name, Outcome.FAILED, "no memory"),
    ]
    (row,) = stage.passed(found)
    assert row.what.startswith("rms_norm ") and row.note.startswith("1 shapes, largest error 0.50")


def test_what_was_not_run_is_said() -> None:
    rows = list(stage.left_out(range(4), {0: 0.1, 1: None, 3: 0.2}))
    assert [row.outcome for row in rows] == [Outcome.SKIPPED] * 2
    assert rows[0].note == f"no time for 1 cases, the first of them {CASES[2].name}"
    assert rows[1].note.startswith("1 cases behind one that lost the card")
    assert not list(stage.left_out(range(1), {0: 0.1}))


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_process_that_lost_its_card_runs_nothing_more(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> float:
        raise RuntimeError("an illegal memory access")

    def synchronize(*_: Any) -> None:
        if is_lost:
            raise RuntimeError("the same again")

    monkeypatch.setattr(stage, "CASES", (replace(CASES[0], run=fail),))
    monkeypatch.setattr(stage, "_is_lost", False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert stage.run_case(0, "cuda") == "an illegal memory access"
    again = stage.run_case(0, "cuda")
    assert again is None if is_lost else isinstance(again, str)
