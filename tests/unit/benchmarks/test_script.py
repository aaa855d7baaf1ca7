"""scripts/bench and scripts/lib/install_peers.sh, as far as they go without setting anything up."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "scripts" / "bench"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_every_name_leads_to_a_benchmark_that_is_there() -> None:
    modules = re.findall(r"module=(\w+)", BENCH.read_text())
    assert len(modules) > 3
    for module in modules:
        place = ROOT / "tests" / "benchmarks" / module
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_the_header_lists_the_names() -> None:
    text = BENCH.read_text()
    names = re.findall(r"^  ([a-z][a-z-]+)\) module=", text, re.MULTILINE)
    listed = re.findall(r"^#   ([a-z-]+) ", text, re.MULTILINE)
    assert names == listed


def test_an_unknown_name_is_an_error_of_one_line() -> None:
    done = run(BENCH, "blocks")
    assert done.returncode == 1
    assert done.stderr.startswith("error: blocks: not one of static-batch,")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("vllm", "sglang")])
def test_install_peers_checks_all_names_first(arguments: tuple[str, ...]) -> None:
    done = run(ROOT / "scripts" / "lib" / "install_peers.sh", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "vllm, llamacpp, openvino" in done.stderr
