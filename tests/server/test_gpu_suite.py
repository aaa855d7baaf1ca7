"""The GPU suite on its CPU stand-in: the whole frame, with the real server in its last stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.stages import CPU_SUITE_SECONDS, STAGES

ROOT = Path(__file__).parents[2]


def test_the_suite_runs_on_the_stand_in(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu" / "run.sh"), "--cpu", "--out", str(tmp_path)],
        env=dict(os.environ) | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=CPU_SUITE_SECONDS + 60,
        check=False,
    )
    rows = json.loads((tmp_path / "suite.json").read_text())["rows"]
    assert [row for row in rows if row["outcome"] == "failed"] == [], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["stage"] for row in rows} == {stage.title for stage in STAGES}
    streamed = [row for row in rows if row["what"].startswith("tritonserver, 4 streams")]
    assert [row["unit"] for row in streamed] == ["ms", "ms", "tokens/s"]
    assert all(row["value"] > 0 for row in streamed)
    assert (tmp_path / "suite.md").read_text().startswith("### no card: ")
