"""Installs the fake ``triton_python_backend_utils`` before any adapter is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.fakes import fake_pb_utils

# The real module exists only inside the server's stub process, and adapters import it at their
# top, so it has to be in place when pytest imports the test modules: a fixture would be too late.
sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)


@pytest.fixture(autouse=True)
def forget_what_the_fake_recorded() -> Iterator[None]:
    fake_pb_utils.reset()
    yield
    fake_pb_utils.reset()
