"""What the interpreter takes the compiler may not: kernels compiled for a card that is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "gpu" / "compile_kernels.py"
ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
KERNELS = {
    "_rms_norm",
    "_activate",
    "_choose",
    "_put_together",
    "_multiply",
    "_combine",
    "_rope_and_write",
    "attend_tile",
    "join_splits",
    "_move_blocks",
    "_largest_of_part",
    "_largest_of_row",
    "_forget",
    "_count",
    "_add_biases",
    "_penalise",
    "_mask",
    "_sample",
}
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""Bytes that a program may have, by compute capability."""


needs_assembler = pytest.mark.skipif(
    not ASSEMBLER.exists(), reason="this Triton brings no assembler for NVIDIA"
)


@pytest.mark.interpreter
@needs_assembler
def test_each_kernel_compiles_and_fits(tmp_path: Path) -> None:
    versions = compiled(90, ("--dtypes", "bf16", "--every", "5"), tmp_path)
    assert {version["kernel"] for version in versions} == KERNELS
    assert too_large(versions, 90) == []


@pytest.mark.slow
@needs_assembler
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_version_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    versions = compiled(capability, (), tmp_path)
    assert {version["kernel"] for version in versions} == KERNELS
    assert too_large(versions, capability) == []


@pytest.mark.slow
@needs_assembler
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_default_launches_fit(capability: int, tmp_path: Path) -> None:
    versions = compiled(capability, ("--launches", "defaults"), tmp_path)
    assert {version["kernel"] for version in versions} == {"attend_tile", "join_splits"}
    assert too_large(versions, capability) == []


def compiled(capability: int, options: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, SCRIPT, "--capability", str(capability), *options],
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def too_large(versions: list[dict[str, Any]], capability: int) -> list[dict[str, Any]]:
    return [v for v in versions if v["shared_memory"] > SHARED_MEMORY[capability]]


@pytest.mark.interpreter
def test_no_iteration_compiles_what_a_load_has_not() -> None:
    found = printed("steady_versions.py")
    assert found["new"] == []
    assert set(found["kernels"]) == KERNELS


@pytest.mark.interpreter
def test_no_kernel_and_no_sampling_reads_the_device_from_the_host() -> None:
    found = printed("no_host_reads.py")
    assert found["rows"] > 500
    assert set(found["kernels"]) == KERNELS - {"_move_blocks"}


def printed(script: str) -> Any:
    """By a script that compiles nothing."""
    run = subprocess.run(
        [sys.executable, SCRIPT.with_name(script)],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)
