"""A stage's process: read while it runs, ended in time, and never without a row."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.rows import Outcome, Row
from tests.gpu.stage_process import run_stage


def run(code: str, limit: float = 30.0) -> tuple[list[Row], list[str]]:
    shown: list[str] = []
    rows = run_stage([sys.executable, "-uc", code], {"PATH": "/bin"}, limit, shown.append)
    return rows, shown


def test_rows_and_progress_are_told_apart() -> None:
    rows, shown = run('print("loading"); print(\'{"what": "a", "value": 2}\'); print()')
    assert rows == [Row(what="a", value=2)]
    assert shown == ["loading"]


def test_what_it_says_on_standard_error_is_shown() -> None:
    rows, shown = run('import sys; print("careful", file=sys.stderr); print(\'{"what": "a"}\')')
    assert shown == ["careful"] and [row.outcome for row in rows] == [Outcome.OK]


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("raise ValueError('it broke')", "exit code 1: ValueError: it broke"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("print('nothing else')", "it printed no row"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
def test_a_stage_that_ends_badly_is_a_row_that_says_how(code: str, note: str) -> None:
    rows, _ = run(code)
    assert rows[-1] == Row(what="the stage itself", outcome=Outcome.FAILED, note=note)


def test_what_came_before_a_failure_counts() -> None:
    rows, _ = run('print(\'{"what": "a"}\', flush=True); raise SystemExit("gave up")')
    assert rows[0] == Row(what="a")
    assert rows[1].note == "exit code 1: gave up"


def test_a_row_that_breaks_the_contract_is_a_failure() -> None:
    rows, _ = run('print(\'{"what": "a", "value": "fast"}\')')
    assert rows[0].outcome is Outcome.FAILED and "'fast' is not a number" in rows[0].note


def test_a_stage_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
print('{{"what": "first"}}', flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(marker)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    began = time.monotonic()
    rows, _ = run(code, limit=1.5)
    assert time.monotonic() - began < 30
    assert [row.what for row in rows] == ["first", "the stage itself"]
    assert rows[1].note == "stopped after 2 s"
    assert not is_running(int(marker.read_text()))


def test_what_a_stage_leaves_running_is_ended(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open({str(marker)!r}, "w").write(str(child.pid))
print('{{"what": "done"}}')
"""
    rows, _ = run(code)
    assert rows == [Row(what="done")]
    assert not is_running(int(marker.read_text()))


def is_running(pid: int) -> bool:
    """After a moment in which the system may still have to end it. A zombie does not run."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    os.kill(pid, 9)
    return True
