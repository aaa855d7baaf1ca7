"""Processes as /proc shows them: children, identity, and whole groups."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_ENDED_STATES = frozenset("ZX")
_MODEL_OF_STUB = re.compile(r"/([^/]+)/\d+/model\.py")


@dataclass(frozen=True, slots=True)
class Child:
    """A process, told apart from a later one with the same id by its start time."""

    pid: int
    start_ticks: int
    name: str
    """The model a stub serves, else the program's name."""

    @property
    def is_alive(self) -> bool:
        """False also for a zombie: the server does not wait for a stub that died."""
        stat = _read_stat(self.pid)
        return (
            stat is not None
            and stat.start_ticks == self.start_ticks
            and stat.state not in _ENDED_STATES
        )


def children_of(parent: int) -> tuple[Child, ...]:
    """The living direct children of a process, by id."""
    found = []
    for directory in _PROC.glob("[0-9]*"):
        pid = int(directory.name)
        stat = _read_stat(pid)
        if stat is not None and stat.parent == parent and stat.state not in _ENDED_STATES:
            found.append(Child(pid, stat.start_ticks, _name_of(pid, stat.command)))
    return tuple(sorted(found, key=lambda child: child.pid))


def kill_group(group: int, patience_seconds: float = 5.0) -> bool:
    """SIGKILL to every process of the group; True when none is left within the time.

    Waits, because shared memory may be removed only after the last process that has it mapped.
    """
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return True
        if not _has_living_member(group):
            return True  # zombies only: their parent, not we, must wait for them
        time.sleep(0.02)
    return False


@dataclass(frozen=True, slots=True)
class _Stat:
    command: str
    state: str
    parent: int
    group: int
    start_ticks: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # proc(5): "pid (command) state ppid pgrp ...", and a command may hold spaces and brackets.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return _Stat(
        command=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        start_ticks=int(fields[19]),
    )


def _has_living_member(group: int) -> bool:
    stats = (_read_stat(int(directory.name)) for directory in _PROC.glob("[0-9]*"))
    return any(s is not None and s.group == group and s.state not in _ENDED_STATES for s in stats)


def _name_of(pid: int, command: str) -> str:
    try:
        line = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return command
    model = _MODEL_OF_STUB.search(line)
    return model.group(1) if model else command
