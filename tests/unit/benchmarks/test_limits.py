"""How fast bytes are multiplied: what is asked where, and that the loop is compiled and runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inflight.native.cpu import may_have
from tests.benchmarks.compare import limits


@pytest.mark.parametrize(
    ("of_loop", "has_amx", "expected"), [(5.0, False, 5.0), (5.0, True, 9.0), (0.0, False, 9.0)]
)
def test_torch_is_asked_where_it_may_be_faster_than_vectors(
    monkeypatch: pytest.MonkeyPatch, of_loop: float, has_amx: bool, expected: float
) -> None:
    asked: list[str] = []

    def of_torch(kind: str, seconds: float) -> float:
        asked.append(kind)
        return 9.0

    monkeypatch.setattr(limits, "byte_product_rate", lambda *_: of_loop)
    monkeypatch.setattr(limits, "multiply_rate", of_torch)
    monkeypatch.setattr(limits, "may_have", lambda isa: has_amx)
    assert limits.int8_rate(2, Path()) == expected
    assert asked == ([] if expected == of_loop else ["int8"])


def test_the_loop_multiplies_where_there_are_instructions_for_it(tmp_path: Path) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    rate = limits.byte_product_rate(2, tmp_path, seconds=0.01)
    assert (tmp_path / "byte_products.so").is_file()
    assert rate > 0 or not may_have("avx2")


def test_without_a_compiler_there_is_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert limits.byte_product_rate(2, tmp_path) == 0
