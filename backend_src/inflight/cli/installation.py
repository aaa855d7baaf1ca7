"""Where NVIDIA's server lies on this machine, and how its Python backend is put together.

Two places are known: the wheel ``nvidia-pytriton``, which carries the binary, the Python backend
and a stub for each Python version in separate folders; and NVIDIA's container, where
``tritonserver`` is on PATH and its backends folder is complete.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from inflight.cli.errors import StartupError

STUB_NAME = "triton_python_backend_stub"
BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """The binary, the folder with the two backend files, and the stub of one Python version."""

    server: Path
    python_backend: Path
    stub: Path

    @property
    def is_wheel(self) -> bool:
        """True for the wheel's, whose stub is not beside the backend; False for a container's."""
        return self.stub.parent != self.python_backend

    def backend_directory(self, scratch: Path) -> Path:
        """A folder for ``--backend-directory``: the container's own, or one made in ``scratch``.

        The wheel's files are linked, not copied: their run paths lead to libraries beside the
        original, and a copied stub would wait for ever for libraries that it cannot find.
        """
        if not self.is_wheel:
            return self.python_backend.parent
        assembled = scratch / "backends" / "python"
        assembled.mkdir(parents=True)
        for file in (*(self.python_backend / name for name in BACKEND_FILES), self.stub):
            (assembled / file.name).symlink_to(file)
        return assembled.parent


def find_installation() -> TritonInstallation:
    """The wheel's server if the wheel is installed, else the one on PATH.

    Raises StartupError when there is none, or none with a stub for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        return _complete(_in_wheel(Path(next(iter(spec.submodule_search_locations)))))
    server = shutil.which("tritonserver")
    if server is not None:
        return _complete(_in_container(Path(server).resolve()))
    raise StartupError(
        "no tritonserver",
        remedy="pip install --no-deps nvidia-pytriton, or run inside NVIDIA's container",
    )


def python_version() -> str:
    """The version that stubs are named by, such as ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def libpython_directory() -> Path | None:
    """The folder with this interpreter's own libpython, None where it has none of its own.

    A stub finds a system library by itself. An interpreter outside the system's folders (pyenv,
    conda, uv) must be named, or the stub runs another micro version's library on its modules.
    """
    name = sysconfig.get_config_var("INSTSONAME")
    directory = Path(sys.base_prefix) / "lib"
    if isinstance(name, str) and ".so" in name and (directory / name).exists():
        return directory
    return None


def _in_wheel(package: Path) -> TritonInstallation:
    root = package / "tritonserver"
    return TritonInstallation(
        server=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / python_version() / STUB_NAME,
    )


def _in_container(server: Path) -> TritonInstallation:
    backend = server.parent.parent / "backends" / "python"
    return TritonInstallation(server=server, python_backend=backend, stub=backend / STUB_NAME)


def _complete(installation: TritonInstallation) -> TritonInstallation:
    if not installation.stub.is_file():
        raise StartupError(
            f"no Python backend stub for Python {python_version()} in {installation.stub.parent}",
            remedy="use Python 3.10, 3.11, 3.12 or 3.13",
        )
    needed = (installation.server, *(installation.python_backend / f for f in BACKEND_FILES))
    for file in needed:
        if not file.is_file():
            raise StartupError(f"the tritonserver installation is incomplete: {file} is missing")
    return installation
