"""Whoever ends a first start has it ended: compilers and builds with it, and nothing half made."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.sleeping_compiler import SleepingCompiler
from tests.unit.checkpoint.folders import make_folder

ENDS_WITHIN = 60.0
"""Seconds; the compiler, and what stands for a build, would take ten minutes."""
NO_WEIGHTS = struct.pack("<Q", 2) + b"{}"
"""As a safetensors file."""


@pytest.fixture
def compiler(tmp_path: Path) -> SleepingCompiler:
    return SleepingCompiler(tmp_path / "bin")


def start_preparing(model: Path, cache: Path, compiler: SleepingCompiler) -> subprocess.Popen[str]:
    """What ``inflight serve`` does before it starts the server."""
    command = [sys.executable, "-m", "inflight.cli", "prepare", "--device", "cpu", "--runner", "hf"]
    return subprocess.Popen(
        [*command, "--model", str(model), "--cache-dir", str(cache)],
        env=os.environ | {"PATH": compiler.path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def half_made(cache: Path) -> list[Path]:
    return list(cache.glob("*/*.partial"))


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_compilers(
    tmp_path: Path, compiler: SleepingCompiler, number: int, exit_code: int
) -> None:
    cache = tmp_path / "cache"
    model = make_folder(tmp_path / "model")
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    with start_preparing(model, cache, compiler) as process:
        compiler.wait_until_it_sleeps()
        assert half_made(cache)
        process.send_signal(number)
        process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == exit_code
    assert compiler.left_running() == [] and half_made(cache) == []


BUILDING = """
import sys
from inflight.api.config import InflightConfig
from inflight.cli import preparation
from inflight.cli.stop_signals import exit_in_order

exit_in_order()
preparation._BUILD = [sys.executable, "-c", sys.argv[1]]
preparation.run_build(InflightConfig())
"""
BUILD = """
import sys, time
from pathlib import Path
from inflight.cache_folder import make_once
from inflight.cli.stop_signals import exit_in_order

def make(folder, lock_fd):
    print("building", flush=True)
    time.sleep(600)

exit_in_order()
target = Path({target!r})
make_once(target, make, is_made=target.is_dir, on_wait=lambda: None)
"""


def start_building(cache: Path) -> subprocess.Popen[str]:
    """A process that runs a build, which has begun. Who reads its output waits for both."""
    build = BUILD.format(target=str(cache / "engines" / "key"))
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDING, build],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    assert half_made(cache)
    return process


def test_a_build_dies_with_the_process_that_wants_it(tmp_path: Path) -> None:
    with start_building(tmp_path) as process:
        process.kill()
        process.communicate(timeout=ENDS_WITHIN)  # the build holds the other end of the pipes
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_build_clears_away_when_its_parent_is_told_to_end(tmp_path: Path, number: int) -> None:
    with start_building(tmp_path) as process:
        process.send_signal(number)
        process.communicate(timeout=ENDS_WITHIN)
    assert half_made(tmp_path) == []


def test_ctrl_c_at_a_terminal_reaches_both_and_clears_away_as_well(tmp_path: Path) -> None:
    with start_building(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=ENDS_WITHIN)
    assert half_made(tmp_path) == []
