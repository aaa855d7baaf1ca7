"""The server's output: kept for the reason of a failure, and shown without what helps nobody."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

_KEPT_LINES = 200
_REASON_LINES = 3

_GLOG = re.compile(r'^(?P<level>[IWEF])\d{4} \S+ \d+ (?P<file>[\w.]+):\d+\] ?"?(?P<text>.*?)"?$')
_FAILED_TO_LOAD = re.compile(
    r"failed to load '[^']+' version \d+: (?:\w+: )?(?:TritonModelException: )?(.*)"
)
_TRACE = re.compile(r"\\n\\nAt:\\n.*$")

_HARMLESS_WITHOUT_GPU = (
    "Unable to allocate pinned system memory",
    "failed to allocate pinned system memory: no pinned memory pool",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "unable to create stream for",
)
_TELLING_SOURCES = frozenset({"model_lifecycle.cc"})


def is_worth_showing(line: str) -> bool:
    """False for the noise of a machine without GPU, option tables and most of the server's infos.

    What the models write themselves is always shown.
    """
    if not line.strip() or line.startswith(("+--", "| ")):
        return False
    if any(phrase in line for phrase in _HARMLESS_WITHOUT_GPU):
        return False
    event = _GLOG.match(line)
    if event is None or event["level"] != "I":
        return True
    return event["file"].endswith(".py") or event["file"] in _TELLING_SOURCES


class ServerLog:
    """Takes the lines of one server process in a thread of its own, and hands them to ``show``."""

    def __init__(self, output: IO[str], show: Callable[[str], None]) -> None:
        self._output = output
        self._show = show
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._pump, name="server-log", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 2.0) -> None:
        """Waits until the last line has been taken: all who can write must have ended."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._output.close()

    def reason(self) -> str:
        """Why the server failed, in one line, as far as its log says."""
        lines = list(self._lines)
        for line in lines:
            failed = _FAILED_TO_LOAD.search(line)
            if failed:
                return _TRACE.sub("", failed.group(1)).rstrip('"').strip()
        events = [(_GLOG.match(line), line) for line in lines if is_worth_showing(line)]
        errors = [event["text"] for event, _ in events if event and event["level"] in "EF"]
        plain = [line.strip() for event, line in events if event is None]
        return " / ".join((errors or plain)[-_REASON_LINES:]) or "its log says nothing"

    def _pump(self) -> None:
        for line in self._output:
            text = line.rstrip("\n")
            self._lines.append(text)
            # A full disk or a closed terminal must not stop us: the server would wait at its pipe.
            with contextlib.suppress(OSError, ValueError):
                self._show(text)
