"""NVIDIA's server: its binary, the stub of this Python, and what both need of the machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from inflight.cli import preflight
from inflight.cli.doctor.finding import Finding, Status, of_check, size_text
from inflight.cli.installation import (
    TritonInstallation,
    find_installation,
    libpython_directory,
    python_version,
)
from inflight.cli.launch import check_first_python, default_model_repository
from inflight.cli.ports import Endpoints, check_ports
from inflight.cli.shared_memory import DIRECTORY

_FETCHED_ANALYZER = Path("build") / "perf_analyzer" / "perf_analyzer"


def look_at_server() -> Finding:
    """The binary and the Python backend."""
    found: list[TritonInstallation] = []
    finding = of_check(
        "tritonserver",
        lambda: found.append(find_installation()),
        found="",
        means="it starts, with the stub for this Python",
    )
    if not found:
        return finding
    kind = "the wheel's" if found[0].is_wheel else "the container's"
    return Finding(
        what=finding.what,
        found=f"{kind}, {found[0].server}",
        means=f"{finding.means} ({python_version()})",
    )


def look_at_stub(environment: Mapping[str, str]) -> Finding:
    """Its shared libraries, libpython above all, in the environment that the server will have."""
    own = libpython_directory()
    return of_check(
        "stub",
        lambda: preflight.check_stub_libraries(find_installation().stub, environment),
        found=f"all its libraries are there, libpython {f'in {own}' if own else 'of the system'}",
        means="Python models can run",
    )


def look_at_numpy() -> Finding:
    """The version rule of the stubs."""
    return of_check(
        "numpy",
        lambda: preflight.check_numpy(find_installation()),
        found=version("numpy"),
        means="it fits the stub",
    )


def look_at_first_python(environment: Mapping[str, str]) -> Finding:
    """The stub takes its modules from it, whatever runs this."""
    return of_check(
        "python3",
        lambda: check_first_python(environment),
        found="the first on the server's PATH is the one that runs this",
        means="the models find the package",
    )


def look_at_shared_memory() -> Finding:
    """Room in /dev/shm."""
    free = shutil.disk_usage(DIRECTORY).free if DIRECTORY.is_dir() else 0
    return of_check(
        "shared memory",
        preflight.check_shared_memory,
        found=f"{size_text(free)} free in {DIRECTORY}",
        means="the stubs talk to the server through it",
    )


def look_at_ports(endpoints: Endpoints) -> Finding:
    """The three that the server listens on."""
    ports = ", ".join(str(port) for port in endpoints.ports().values())
    return of_check(
        "ports",
        lambda: check_ports(endpoints),
        found=f"{ports} are free on {endpoints.host}",
        means="HTTP, gRPC and metrics can listen",
    )


def look_at_model_repository(directory: Path) -> Finding:
    """What the server is pointed at."""
    return of_check(
        "model repository",
        lambda: preflight.check_model_repository(directory),
        found=str(directory),
        means="the server finds its models",
    )


def look_at_perf_analyzer() -> Finding:
    """NVIDIA's load generator, which only measurements need."""
    fetched = default_model_repository().resolve().parent / _FETCHED_ANALYZER
    program = shutil.which("perf_analyzer") or (str(fetched) if fetched.is_file() else None)
    if program is not None:
        means = "perf_analyzer_configs/run.sh measures with it"
        return Finding(what="perf_analyzer", found=program, means=means)
    return Finding(
        what="perf_analyzer",
        found="not on PATH, and not fetched yet",
        means="only measuring the server needs it; 14 MB are fetched once",
        status=Status.NOTE,
        remedy="bash perf_analyzer_configs/run.sh",
    )
