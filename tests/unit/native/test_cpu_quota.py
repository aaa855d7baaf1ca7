"""What control groups of both versions grant, read from a root folder of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.native.cpu_quota import cpu_quota

V1 = "4:memory:/elsewhere\n3:cpu,cpuacct:/a/b\n0::/\n"
V2 = "0::/a/b\n"


def root_with(root: Path, group: str, files: dict[str, str]) -> Path:
    """``files``: below /sys/fs/cgroup."""
    for name, text in {"../../../proc/self/cgroup": group, **files}.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(folder: str, quota: str, period: str = "100000\n") -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        (V2, {}, None),
        (V2, {"cpu.max": "max 100000\n"}, None),
        (V2, {"cpu.max": "250000 100000\n"}, 2.5),
        (V2, {"a/b/cpu.max": "150000 100000\n", "a/cpu.max": "max 100000\n"}, 1.5),
        (V2, {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "100000 50000\n"}, 2.0),
        (V2, {"a/cpu.max": "200000 100000\n", "a/c/cpu.max": "100000 100000\n"}, 2.0),
        ("0::/../a\n", {"a/cpu.max": "300000 100000"}, 3.0),
        (V2, {"cpu.max": "nonsense"}, None),
        (V2, {"cpu.max": ""}, None),
        (V2, {"cpu.max": "100000 0"}, None),
        (V1, v1("cpu,cpuacct/a/b", "-1\n"), None),
        (V1, v1("cpu,cpuacct/a/b", "50000\n"), 0.5),
        (V1, v1("cpu/a", "300000\n") | v1("cpu", "-1\n"), 3.0),
        (V1, v1("cpu,cpuacct", "200000\n"), 2.0),
        (V1, v1("memory/elsewhere", "100000\n"), None),
        ("", {"cpu.max": "200000 100000"}, 2.0),
        ("nothing that anybody knows", {}, None),
    ],
)
def test_the_smallest_grant_on_the_way_to_the_root(
    tmp_path: Path, group: str, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_quota(root_with(tmp_path, group, files)) == cores


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
