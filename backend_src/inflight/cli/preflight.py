"""What is looked at before the server starts, because the server itself fails badly at it.

A stub that cannot load its libraries leaves the server waiting for ever; a numpy that does not fit
the stub gives silently empty tensors; a small /dev/shm fails under load. Each check is a function
that raises StartupError with one line saying what is wrong and what to do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from inflight.cli.errors import StartupError
from inflight.cli.installation import python_version

_LEAST_SHARED_MEMORY = 32 << 20
_MIB = 1 << 20


def check_stub_libraries(stub: Path, environment: Mapping[str, str]) -> None:
    """Every shared library of the stub is found in the environment the server will have."""
    if shutil.which("ldd") is None:
        raise StartupError("ldd is not on PATH (Debian: apt-get install libc-bin)")
    listing = subprocess.run(
        ["ldd", str(stub)], env=dict(environment), capture_output=True, text=True, check=False
    )
    if listing.returncode:
        raise StartupError(f"ldd cannot read {stub}: {listing.stderr.strip()}")
    missing = missing_libraries(listing.stdout)
    if missing:
        raise StartupError(
            f"the Python backend needs {', '.join(missing)}, which this machine lacks: "
            + _remedy(missing)
        )


def missing_libraries(listing: str) -> list[str]:
    """The libraries that ``ldd`` lists as not found, in its order."""
    return re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)


def _remedy(missing: list[str]) -> str:
    if any(name.startswith("libpython") for name in missing):
        package = f"libpython{python_version()}"
        return (
            f"apt-get install {package}, or a Python built with --enable-shared "
            "(pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install), or Python 3.13"
        )
    return "reinstall the wheel nvidia-pytriton, or look at LD_LIBRARY_PATH"


def check_numpy(installed: str | None = None, python: str | None = None) -> None:
    """numpy 2 on Python 3.10 or 3.11: the stub hands out empty tensors and says nothing."""
    installed = version("numpy") if installed is None else installed
    python = python_version() if python is None else python
    if python in ("3.10", "3.11") and int(installed.split(".")[0]) >= 2:
        raise StartupError(
            f"numpy {installed} does not work with the Python backend's stub for Python {python}: "
            "pip install 'numpy<2'"
        )


def check_shared_memory(directory: Path = Path("/dev/shm")) -> None:
    """Each stub takes 1 MiB of shared memory, and more while requests wait."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise StartupError(f"{directory}: {error.strerror}: shared memory is needed") from None
    if free < _LEAST_SHARED_MEMORY:
        raise StartupError(
            f"{directory} has {free / _MIB:.0f} MiB free, {_LEAST_SHARED_MEMORY // _MIB} MiB are "
            "needed (docker run --shm-size=256m; Kubernetes: an emptyDir of medium Memory)"
        )


def check_model_repository(directory: Path) -> None:
    """A folder with at least one model in it."""
    if not directory.is_dir():
        raise StartupError(f"--model-repository {directory}: there is no such folder")
    if not any(directory.glob("*/config.pbtxt")):
        raise StartupError(f"--model-repository {directory}: no */config.pbtxt in it")


def has_gpu() -> bool:
    """An NVIDIA driver has made a device node; says nothing of what torch can do with it."""
    return Path("/dev/nvidiactl").exists()


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def speed_hint(*, gpu: bool, compiler: bool) -> str | None:
    """What is missing that would make it faster, in one line; None when nothing is."""
    faster = []
    if not gpu:
        faster.append("a CUDA GPU")
    if not compiler:
        faster.append("a C++ compiler for native CPU kernels (Debian: apt-get install g++)")
    return f"works as it is; would be faster with {' and '.join(faster)}" if faster else None
