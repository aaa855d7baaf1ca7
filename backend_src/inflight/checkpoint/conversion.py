"""Running ``convert.py`` in a process of its own: torch never enters the process that asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

import inflight
from inflight.api.config import process_environment
from inflight.checkpoint.locate import Job
from inflight.errors import CheckpointError

PROGRESS_PREFIX = "progress: "
ERROR_PREFIX = "error: "
"""The two kinds of lines that ``convert.py`` writes to its standard output."""

_LONGEST_REASON = 300


class Converter(Protocol):
    """What ``run_conversion`` does."""

    def __call__(
        self,
        job: Job,
        source: Path,
        target: Path,
        *,
        lock_fd: int,
        progress: Callable[[str], None],
    ) -> None: ...


def run_conversion(
    job: Job, source: Path, target: Path, *, lock_fd: int, progress: Callable[[str], None]
) -> None:
    """Converts ``source`` into the empty folder ``target``, and waits for it.

    The process inherits ``lock_fd``, so a lock on it holds until nobody writes any more, even if
    this process is killed. Raises CheckpointError with one line; ``target`` is then to be thrown
    away.
    """
    command = [
        *(interpreter(), "-W", "ignore", "-m", "inflight.checkpoint.convert"),
        *(job.value, str(source), str(target), str(os.getpid())),
    ]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as noise,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
            errors="replace",
            cwd=target,  # python -m imports from there first: from an empty folder
            env=_environment(),
            pass_fds=(lock_fd,),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            reason = _follow(process.stdout, progress)
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        if status != 0 or not (target / "config.json").is_file():
            what = (reason or _how_it_ended(status, noise))[:_LONGEST_REASON]
            raise CheckpointError(f"model_dir: {source} cannot be converted: {what}")


def interpreter() -> str:
    """A Python of this process's version; in Triton's stub ``sys.executable`` may be the stub."""
    exact = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in _interpreter_candidates(exact):
        if os.access(candidate, os.X_OK):
            return candidate
    raise CheckpointError(
        f"model_dir: a conversion needs {exact}, and none is found in {sys.prefix}/bin or on PATH"
    )


def _interpreter_candidates(exact: str) -> Iterator[str]:
    if Path(sys.executable or "").name.startswith("python"):
        yield sys.executable
    for prefix in (sys.prefix, sys.base_prefix):
        yield from (f"{prefix}/bin/{name}" for name in (exact, "python3"))
    found = shutil.which(exact)
    if found:
        yield found


def _environment() -> dict[str, str]:
    """This environment, offline and quiet, and with this process's import path."""
    package_root = str(Path(inflight.__file__).parent.parent)
    import_path = [os.path.abspath(path) for path in sys.path if path] + [package_root]
    return {
        **process_environment(),
        "PYTHONPATH": os.pathsep.join(import_path),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _follow(lines: IO[str], progress: Callable[[str], None]) -> str:
    """Passes progress on until the process closes its output; returns its error line, or ""."""
    reason = ""
    for line in lines:
        if line.startswith(PROGRESS_PREFIX):
            progress(line.removeprefix(PROGRESS_PREFIX).strip())
        elif line.startswith(ERROR_PREFIX):
            reason = line.removeprefix(ERROR_PREFIX).strip()
    return reason


def _how_it_ended(status: int, noise: IO[str]) -> str:
    if status < 0:
        return f"the conversion was killed by signal {-status} (too little memory?)"
    noise.seek(0)
    last_lines = [line.strip() for line in noise if line.strip()]
    return last_lines[-1] if last_lines else f"the conversion ended with status {status}"
