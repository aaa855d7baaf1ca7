"""What docs/gpu.md says is proved without a card is what the tests have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.interpreter.proved_without_card import ROOT, pages  # noqa: E402

pytestmark = pytest.mark.interpreter

PAGE = ROOT / "docs" / "gpu.md"
PACKAGE = ROOT / "backend_src" / "inflight"
ASKS_FOR_A_GPU = re.compile(
    r"torch\.cuda\b|is_cuda|device\.type|pin_memory|_scaled_mm|import flashinfer"
)
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_numbers_are_what_is_collected() -> None:
    for path, wanted in pages():
        assert path.read_text(encoding="utf-8") == wanted, (
            "run: python -m tests.interpreter.proved_without_card"
        )


def test_the_table_of_branches_names_tests_that_are_there() -> None:
    named = NAMED_TEST.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(ROOT / file)]
    assert not missing


def test_every_file_that_asks_for_a_gpu_is_in_the_table_of_branches() -> None:
    page = PAGE.read_text(encoding="utf-8")
    asking = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if ASKS_FOR_A_GPU.search(path.read_text(encoding="utf-8"))
    ]
    assert len(asking) > 5
    assert not [name for name in asking if f"`{name}`" not in page]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
