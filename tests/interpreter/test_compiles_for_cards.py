"""What the interpreter takes the compiler may not: kernels compiled for a card that is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "gpu" / "compile_kernels.py"
ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
KERNELS = {
    "_rms_norm",
    "_activate",
    "_rope_and_write",
    "attend_tile",
    "join_splits",
    "_move_blocks",
    "_largest_of_part",
    "_largest_of_row",
}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
"""Bytes that a program may have, by compute capability."""


@pytest.mark.interpreter
@pytest.mark.skipif(not ASSEMBLER.exists(), reason="this Triton brings no assembler for NVIDIA")
def test_each_kernel_compiles_and_fits(tmp_path: Path) -> None:
    check(90, ("--dtypes", "bf16", "--every", "8"), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not ASSEMBLER.exists(), reason="this Triton brings no assembler for NVIDIA")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_version_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    check(capability, (), tmp_path)


def check(capability: int, options: tuple[str, ...], folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, "--capability", str(capability), *options],
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    versions = [json.loads(line) for line in run.stdout.splitlines()]
    assert {version["kernel"] for version in versions} == KERNELS
    most = SHARED_MEMORY[capability]
    assert [v for v in versions if v["shared_memory"] > most or v["registers"] > 255] == []


@pytest.mark.interpreter
def test_no_iteration_compiles_what_a_warm_up_has_not() -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT.with_name("steady_versions.py")],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["new"] == []
    assert found["warm_up"] >= 8
