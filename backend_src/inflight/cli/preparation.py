"""What is made once and kept in the cache: converted checkpoint, native kernels, built engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

from inflight.api.config import InflightConfig, process_environment
from inflight.api.config_sources import environment_of
from inflight.checkpoint import Checkpoint, prepare_checkpoint
from inflight.cli.doctor.accelerator import computes_on_card
from inflight.cli.errors import StartupError
from inflight.cli.memory import available_memory, check_memory
from inflight.engine_files.key import engine_key
from inflight.engine_files.store import EngineStore
from inflight.model.choice import why_not_native
from inflight.native.build import NativeUnavailableError, build_native

_QUICK_SECONDS = 0.5
"""Longer than it takes to see that the kernels are compiled already."""


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
    has_kernels = threading.Event()
    kernels = threading.Thread(
        target=_compile_kernels, args=(config.cache_dir, has_kernels), daemon=True
    )
    kernels.start()
    checkpoint = prepare_checkpoint(config.model_dir, config.cache_dir, progress=say)
    check_memory(checkpoint.directory, config.dtype, available_memory())
    kernels.join(_QUICK_SECONDS)
    if kernels.is_alive():
        say("compiling the native kernels (once)")
    may_have_kernels = kernels.is_alive() or has_kernels.is_set()
    if may_have_kernels and needs_engine(checkpoint, config):
        say(f"building the engine of {checkpoint.name} (once)")
        run_build(config)
    kernels.join()
    return checkpoint


def needs_engine(checkpoint: Checkpoint, config: InflightConfig) -> bool:
    """Whether a server of this configuration would have to build one first; needs no torch."""
    if config.runner == "hf":
        return False
    reason = why_not_native(checkpoint.directory, config)
    if reason is not None and config.runner == "auto":
        return False
    store = EngineStore(config.cache_dir)
    key = engine_key(checkpoint.directory, config.dtype, config.cache_dir)
    return not store.has(key) and store.reason_against(key) is None


def run_build(config: InflightConfig) -> None:
    """``inflight build`` in a process of its own, which ends with its torch and its memory; its
    progress goes to our standard output. Raises StartupError with the line that it ended with."""
    values = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    environment = process_environment() | environment_of(values)
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        done = subprocess.run(
            [sys.executable, "-m", "inflight.cli", "build"],
            env=environment,
            stderr=complaints,
            check=False,
        )
        complaints.seek(0)
        lines = [line.strip() for line in complaints if line.strip()]
    if done.returncode:
        raise StartupError(f"the engine cannot be built: {_why(done.returncode, lines)}")
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)


def _why(returncode: int, lines: Sequence[str]) -> str:
    """``lines``: what a process that failed has said."""
    if returncode < 0:  # what it said before is not the reason
        return f"it was killed by signal {-returncode} (too little memory?)"
    return lines[-1].removeprefix("inflight: ") if lines else f"exit code {returncode}"


def _compile_kernels(cache_dir: str, done: threading.Event) -> None:
    with contextlib.suppress(NativeUnavailableError):
        build_native(cache_dir)
        done.set()
