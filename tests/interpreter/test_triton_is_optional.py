"""Where Triton's language is not installed, its kernels say so and nothing else breaks."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.interpreter

CODE = """
import importlib, importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
sys.modules["triton"] = None
from inflight.errors import ConfigError
from inflight.kernels import kv_layout, launch
for name in ("attention", "blocks", "tuning"):
    try:
        importlib.import_module("inflight.kernels." + name)
    except ConfigError as error:
        print(error)
"""


def test_a_missing_triton_is_a_configuration_error_that_names_the_extra() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    assert lines[0].startswith("attention_backend: the package triton is not installed")
    assert "extra `triton`" in lines[0]
