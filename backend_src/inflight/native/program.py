"""run_program: another program, that ends with all it has started when nobody wants it any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 2.0
"""In which a compiler removes its files in /tmp."""

# A group, so that what a compiler's driver has started is reached. Not a session where a group can
# be had: kernels that schedule by session (autogroup) heed niceness within one alone.
_OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


class StoppedError(Exception):
    """Somebody set ``stop``."""


def run_program(
    command: Sequence[str], *, seconds: float, stop: threading.Event
) -> subprocess.CompletedProcess[str]:
    """What it printed and how it ended. It is ended, with its children, when ``stop`` is set or by
    any exception. Raises StoppedError; OSError, subprocess.TimeoutExpired as subprocess.run."""
    if stop.is_set():
        raise StoppedError
    deadline = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        **_OWN_GROUP,
    ) as process:
        try:
            while True:
                try:
                    output, complaints = process.communicate(timeout=_LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if stop.is_set():
                        raise StoppedError from None
                    if time.monotonic() > deadline:
                        raise
        except BaseException:
            _end(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, complaints)


def _end(process: subprocess.Popen[str]) -> None:
    """Returns when the whole group is gone, or has closed the pipes at least."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return  # its number may be another's by now
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_SECONDS)
