"""A compiler that never ends, and has a child as g++ has; both write down their process ids."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PATIENCE_SECONDS = 60.0
_SCRIPT = """#!/bin/sh
case " $* " in
*" --version "*) echo "sleeping 1.0" ;;
*"/{fails_at} "*) echo "{fails_at}: error: no" >&2; exit 1 ;;
*" -c "*)
    sleep 600 &
    echo $$ $! >>"{ids}"
    wait ;;
esac
"""


class SleepingCompiler:
    def __init__(self, folder: Path, fails_at: str = "nothing") -> None:
        """Makes ``folder``, to be the first on PATH. ``fails_at``: a source."""
        self._ids = folder / "ids"
        folder.mkdir()
        program = folder / "g++"
        program.write_text(_SCRIPT.format(ids=self._ids, fails_at=fails_at))
        program.chmod(0o755)
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def wait_until_it_sleeps(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._started():
            assert time.monotonic() < deadline, "nobody compiles"
            time.sleep(0.01)

    def left_running(self) -> list[int]:
        """Those of its processes that live; one that only waits for its parent has no command."""
        return [process for process in self._started() if _command_line(process)]

    def _started(self) -> list[int]:
        return [int(word) for word in self._ids.read_text().split()] if self._ids.exists() else []


def _command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
