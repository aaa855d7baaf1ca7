"""What is looked at before the server starts, because the server itself fails badly at it.

A stub that cannot load its libraries leaves the server waiting for ever; a numpy that does not fit
the stub corrupts tensors in silence; a small /dev/shm fails under load. Each check is a function
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
from inflight.cli.installation import TritonInstallation, python_version

_LEAST_SHARED_MEMORY = 32 << 20
_MIB = 1 << 20


def check_stub_libraries(stub: Path, environment: Mapping[str, str]) -> None:
    """Every shared library of the stub is found in the environment the server will have."""
    if shutil.which("ldd") is None:
        raise StartupError("ldd is not on PATH", remedy="apt-get install libc-bin")
    listing = subprocess.run(
        ["ldd", str(stub)], env=dict(environment), capture_output=True, text=True, check=False
    )
    if listing.returncode:
        raise StartupError(f"ldd cannot read {stub}: {listing.stderr.strip()}")
    missing = missing_libraries(listing.stdout)
    if missing:
        raise StartupError(
            f"the Python backend needs {', '.join(missing)}, which this machine lacks",
            remedy=_remedy(missing),
        )


def missing_libraries(listing: str) -> list[str]:
    """The libraries that ``ldd`` lists as not found, in its order."""
    return re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)


def _remedy(missing: list[str]) -> str:
    if any(name.startswith("libpython") for name in missing):
        package = f"libpython{python_version()}"
        return (
            f"apt-get install {package}, or a Python built with --enable-shared "
            "(pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install)"
        )
    return "reinstall the wheel nvidia-pytriton, or look at LD_LIBRARY_PATH"


def check_numpy(installation: TritonInstallation, installed: str | None = None) -> None:
    """numpy 2 does not work with the stubs of the wheel, whatever the Python, nor with 24.10's.

    They were compiled against numpy 1 and read its dtype objects directly: with numpy 2 a tensor
    that comes in repeats its first element, and one that goes out is empty or ends the stub.
    """
    installed = version("numpy") if installed is None else installed
    needs_numpy_1 = installation.is_wheel or python_version() in ("3.10", "3.11")
    if needs_numpy_1 and int(installed.split(".")[0]) >= 2:
        raise StartupError(
            f"numpy {installed} does not work with the Python backend's stub",
            remedy="pip install 'numpy<2'",
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
            "needed",
            remedy="docker run --shm-size=256m; Kubernetes: an emptyDir of medium Memory",
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
