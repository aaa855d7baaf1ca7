"""Becomes another program that dies with the process that started it.

Run as a script: ``python exec_guarded.py PARENT_PID PROGRAM ARGUMENT...`` (``guarded`` says it).
A small program of its own, because code between fork and exec in a process with threads may
deadlock. It imports nothing of the package, so that it costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def guarded(command: list[str] | tuple[str, ...]) -> list[str]:
    """``command``, so that it dies with the thread of this process that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the process that started this has died")  # before the death signal was armed
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
