"""cpu_quota: how many cores the control groups of this process grant it.

A process is in one group of the unified hierarchy (v2) or of the ``cpu`` controller's own (v1), and
each group above may grant less. A container often sees its own group as the root, while
``/proc/self/cgroup`` names the path on the host: so groups are looked for along the whole path, and
those that are not visible say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores, possibly a fraction: the smallest grant of the group and those above it; None: nothing
    is limited. ``root``: where /proc and /sys are."""
    mounts = root / "sys/fs/cgroup"
    grants = [
        grant
        for place, group in _groups(root, mounts)
        for folder in (group, *group.parents)
        if (grant := _grant(place / folder)) is not None
    ]
    return min(grants, default=None)


def _groups(root: Path, mounts: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Where a hierarchy is mounted, and the process's group below it."""
    text = _read(root / "proc/self/cgroup")
    for line in (text or "0::/").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        # A group outside the visible tree is named by a path with "..": its visible end counts.
        group = PurePosixPath(*(part for part in path.split("/") if part not in ("", "..")))
        if not controllers:
            yield mounts, group
            yield mounts / "unified", group
        elif "cpu" in controllers.split(","):
            yield mounts / controllers, group
            yield mounts / "cpu", group


def _grant(folder: Path) -> float | None:
    """Cores that one group grants; None where it limits nothing, or is not there."""
    together = _read(folder / "cpu.max")
    if together is not None:
        return _cores(*together.split()[:2])
    return _cores(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _cores(quota: str | None = None, period: str | None = None) -> float | None:
    try:
        cores = int(quota or "") / int(period or "")
    except (ValueError, ZeroDivisionError):  # "max", or nothing that is read
        return None
    return cores if cores > 0 else None  # v1 says -1 where it limits nothing


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
