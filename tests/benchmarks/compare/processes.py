"""Servers of a benchmark: ports, their end, and what they use of CPU and memory (/proc, Linux).

Standard library only: it runs in the peers' environments too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def free_ports(count: int) -> list[int]:
    """Loopback ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Asks a server to end, and ends it after ``seconds``."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def process_tree(root: int) -> set[int]:
    """``root`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, [])
    return found


def cpu_seconds(pids: set[int]) -> float:
    """User and system time that they have used so far."""
    stats = [_stat(pid) for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats if stat) / _TICKS


def machine_busy_seconds() -> float:
    """CPU time that the machine has spent on anything since it started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")


def resident_bytes(pids: set[int]) -> int:
    """Memory that they hold, shared pages shared out (proportional set size)."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # ended meanwhile
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; [] of a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
