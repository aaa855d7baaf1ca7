"""What is made once and kept in the cache: converted checkpoint, native kernels, built engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from inflight.api.config import InflightConfig, process_environment
from inflight.api.config_sources import environment_of
from inflight.checkpoint import Checkpoint, prepare_checkpoint
from inflight.cli.doctor.accelerator import computes_on_card
from inflight.cli.errors import StartupError
from inflight.cli.exec_guarded import guarded
from inflight.cli.memory import available_memory, check_memory
from inflight.engine_files.key import engine_key
from inflight.engine_files.store import EngineStore
from inflight.model.choice import dtype_on_cpu, why_not_native
from inflight.native.build import NativeUnavailableError, build_native

_QUICK_SECONDS = 0.5
"""Longer than it takes to see that the kernels are compiled already."""
_LOOK_SECONDS = 0.2
"""Python sees a signal that comes just before a wait only after it: no wait is endless."""
_GRACE_SECONDS = 5.0
"""In which a build or a compilation that is no longer wanted clears away what it wrote."""
_BUILD = [sys.executable, "-m", "inflight.cli", "build"]


def prepare(config: InflightConfig, say: Callable[[str], None]) -> Checkpoint:
    """All of it, side by side as far as it goes, so that a first start is short: kernels are
    compiled while the checkpoint is converted and the engine's build begins, which waits for them
    where it needs them. There is nothing to do at the next start. For a card that torch reaches,
    only the checkpoint is made; where there is a driver, torch is asked in a process of its own.

    Raises ConfigError; StartupError where there is too little memory for the weights, or the engine
    cannot be built. Kernels that cannot be compiled are no error: the engine computes in torch
    then, and says so.
    """
    if computes_on_card(config.device):
        return prepare_checkpoint(config.model_dir, config.cache_dir, progress=say)
    with _Kernels(config.cache_dir) as kernels:
        checkpoint = prepare_checkpoint(config.model_dir, config.cache_dir, progress=say)
        check_memory(checkpoint.directory, config.dtype, available_memory())
        if not kernels.are_done(_QUICK_SECONDS):
            say("compiling the native kernels (once)")
        if kernels.may_be_there and needs_engine(checkpoint, config):
            say(f"building the engine of {checkpoint.name} (once)")
            run_build(config)
        while not kernels.are_done(_LOOK_SECONDS):
            pass
    return checkpoint


def needs_engine(checkpoint: Checkpoint, config: InflightConfig) -> bool:
    """Whether a server of this configuration would have to build one first; needs no torch."""
    if config.runner == "hf":
        return False
    reason = why_not_native(checkpoint.directory, config)
    if reason is not None and config.runner == "auto":
        return False
    store = EngineStore(config.cache_dir)
    dtype = dtype_on_cpu(config.dtype, is_native=True)
    key = engine_key(checkpoint.directory, dtype, config.cache_dir)
    return not store.has(key) and store.reason_against(key) is None


def run_build(config: InflightConfig) -> None:
    """``inflight build`` in a process of its own, which ends with its torch and its memory; its
    progress goes to our standard output. Raises StartupError with the line that it ended with."""
    values = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    environment = process_environment() | environment_of(values)
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        returncode = _run_guarded(_BUILD, environment, complaints)
        complaints.seek(0)
        lines = [line.strip() for line in complaints if line.strip()]
    if returncode:
        raise StartupError(f"the engine cannot be built: {_why(returncode, lines)}")
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)


def _why(returncode: int, lines: Sequence[str]) -> str:
    """``lines``: what a process that failed has said."""
    if returncode < 0:  # what it said before is not the reason
        return f"it was killed by signal {-returncode} (too little memory?)"
    return lines[-1].removeprefix("inflight: ") if lines else f"exit code {returncode}"


def _run_guarded(command: list[str], environment: Mapping[str, str], complaints: IO[str]) -> int:
    """Its exit status. It dies with this process; where it is no longer waited for, it is asked to
    end first, since what it writes is as large as the weights."""
    with subprocess.Popen(guarded(command), env=environment, stderr=complaints) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
            return process.returncode
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            process.kill()
            raise


class _Kernels:
    """A thread that compiles them; it ends with the block, and the compilers with it."""

    def __init__(self, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._stop = threading.Event()
        # Waited for in place of the thread, which counts as ended when a signal interrupts join().
        self._is_done = threading.Event()
        self._are_there = False

    def __enter__(self) -> _Kernels:
        try:  # start() waits too, and may be interrupted when the thread runs already
            threading.Thread(target=self._compile, name="inflight-kernels", daemon=True).start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        self._stop.set()
        # No longer: it may wait for another process that compiles, and nothing ends that wait.
        self._is_done.wait(_GRACE_SECONDS)

    def are_done(self, seconds: float) -> bool:
        """Waits so long at most."""
        return self._is_done.wait(seconds)

    @property
    def may_be_there(self) -> bool:
        """False where they are known not to be."""
        return not self._is_done.is_set() or self._are_there

    def _compile(self) -> None:
        try:
            with contextlib.suppress(NativeUnavailableError):
                build_native(self._cache_dir, stop=self._stop)
                self._are_there = True
        finally:
            self._is_done.set()
