"""What the interpreter takes the compiler may not: kernels compiled for a card that is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.interpreter

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


@pytest.mark.skipif(not ASSEMBLER.exists(), reason="this Triton brings no assembler for NVIDIA")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--capability", "90", "--dtypes", "bf16", "--every", "8"), id="some"),
        *(
            pytest.param(("--capability", str(card)), id=f"all, {card}", marks=pytest.mark.slow)
            for card in (80, 90)
        ),
    ],
)
def test_every_kernel_compiles_and_fits(options: tuple[str, ...], tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, *options],
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    versions = [json.loads(line) for line in run.stdout.splitlines()]
    assert {version["kernel"] for version in versions} == KERNELS
    most = SHARED_MEMORY[int(options[1])]
    assert [v for v in versions if v["shared_memory"] > most or v["registers"] > 255] == []


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
