"""What ``dtype`` auto is on a CPU."""

from __future__ import annotations

import pytest

from inflight.model import choice
from inflight.model.choice import dtype_on_cpu


@pytest.mark.parametrize(
    ("computes", "is_native", "dtype"),
    [
        (True, True, "bf16"),
        (True, False, "bf16"),
        (False, True, "bf16"),
        (False, False, "fp32"),
    ],
)
def test_auto_is_fp32_where_torch_would_be_slow_in_bf16(
    computes: bool, is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "computes_bf16", lambda: computes)
    assert dtype_on_cpu("auto", is_native=is_native) == dtype


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "int8", "int4", "fp8"])
def test_a_named_dtype_stands_for_itself(
    name: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "computes_bf16", lambda: pytest.fail("nobody needs to know"))
    assert dtype_on_cpu(name, is_native=is_native) == name
