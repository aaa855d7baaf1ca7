"""run_stage: one stage as a process of its own, with a limit, read while it runs."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tests.gpu.rows import Outcome, Row, read_row

_GRACE_SECONDS = 5.0
_LONGEST_NOTE = 160
_MOST_LINE_CHARACTERS = 1 << 20


def run_stage(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float,
    show: Callable[[str], None],
) -> list[Row]:
    """The rows it printed, and one more where it did not end well.

    Nothing of it is left running. ``show`` gets every line that is no row, as it comes.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        rows, last = _collect(lines, time.monotonic() + limit, show)
        is_over = last is not None and _ends(process)
    finally:
        _end_group(process)
        reader.join(_GRACE_SECONDS)
        if not reader.is_alive():
            process.stdout.close()
    if not is_over:
        rows.append(_failed(f"stopped after {limit:.0f} s"))
    elif process.returncode:
        rows.append(_failed(_ending(process.returncode, last or "")))
    elif not rows:
        rows.append(_failed("it printed no row"))
    return rows


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    while line := stream.readline(_MOST_LINE_CHARACTERS):
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _collect(
    lines: queue.Queue[str | None], deadline: float, show: Callable[[str], None]
) -> tuple[list[Row], str | None]:
    """The rows, and the last other line ("" for none); None for it where time ran out."""
    rows: list[Row] = []
    last = ""
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return rows, None
        if line is None:
            return rows, last
        try:
            row = read_row(line)
        except ValueError as error:
            row = Row(what="a row", outcome=Outcome.FAILED, note=str(error)[:_LONGEST_NOTE])
        if row is not None:
            rows.append(row)
        elif line.strip():
            last = line.strip()
            show(last)


def _ends(process: subprocess.Popen[str]) -> bool:
    """Its output is at its end; so is it, unless it closed it early."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_group(process: subprocess.Popen[str]) -> None:
    """SIGTERM, a moment, SIGKILL; also for what a stage left behind that has ended itself. A server
    that it started needs the moment to end its own processes and shared memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # until there is nobody
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int, last: str) -> str:
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {last}"[:_LONGEST_NOTE] if last else how


def _failed(note: str) -> Row:
    return Row(what="the stage itself", outcome=Outcome.FAILED, note=note)
