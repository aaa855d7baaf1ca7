"""The server's command line and environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import inflight
from inflight.api.config import process_environment
from inflight.api.config_sources import CONFIG_FILE_VARIABLE, environment_of
from inflight.cli.errors import StartupError
from inflight.cli.installation import TritonInstallation, libpython_directory
from inflight.cli.ports import Endpoints

EXIT_TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start the server, any number of times."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    endpoints: Endpoints
    exit_timeout_seconds: float = EXIT_TIMEOUT_SECONDS


def server_command(
    installation: TritonInstallation,
    endpoints: Endpoints,
    model_repository: Path,
    backend_directory: Path,
    shared_memory_prefix: str,
) -> tuple[str, ...]:
    """``tritonserver`` on our repository; every path absolute, every address given."""
    options = {
        "model-repository": model_repository.resolve(),
        "backend-directory": backend_directory.resolve(),
        "http-address": endpoints.host,
        "grpc-address": endpoints.host,
        "metrics-address": endpoints.host,
        "http-port": endpoints.http_port,
        "grpc-port": endpoints.grpc_port,
        "metrics-port": endpoints.metrics_port,
        "exit-timeout-secs": EXIT_TIMEOUT_SECONDS,
        "backend-config": f"python,shm-region-prefix-name={shared_memory_prefix}",
    }
    return (str(installation.server), *(f"--{name}={value}" for name, value in options.items()))


def server_environment(
    config_values: Mapping[str, object], config_file: Path | None
) -> dict[str, str]:
    """This process's environment, with our Python first and the configuration on top.

    The stub takes the modules of the first ``python3`` on PATH and ignores PYTHONPATH and
    VIRTUAL_ENV, so they are dropped: nobody shall believe that they do something.
    """
    environment = process_environment()
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    environment["PATH"] = _joined(Path(sys.executable).parent, environment.get("PATH"))
    libpython = libpython_directory()
    if libpython is not None:
        environment["LD_LIBRARY_PATH"] = _joined(libpython, environment.get("LD_LIBRARY_PATH"))
    environment.update(environment_of(config_values))
    if config_file is not None:
        environment[CONFIG_FILE_VARIABLE] = str(config_file.resolve())
    return environment


def check_first_python(environment: Mapping[str, str]) -> None:
    """The ``python3`` that the stub will find is the one that runs us."""
    found = shutil.which("python3", path=environment["PATH"])
    if found is None or not os.path.samefile(found, sys.executable):
        raise StartupError(
            f"the first python3 on PATH would be {found}, not {sys.executable}, and the models "
            "would not find the package",
            remedy="make a virtual environment with python -m venv",
        )


def default_model_repository() -> Path:
    """``model_repository`` of the checkout this package is imported from, else of this folder."""
    checkout = Path(inflight.__file__).resolve().parents[2] / "model_repository"
    return checkout if checkout.is_dir() else Path("model_repository")


def _joined(first: Path, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)
