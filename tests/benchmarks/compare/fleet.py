"""The worker processes: started when first needed, kept loaded, asked one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.processes import (
    available_bytes,
    cpu_seconds,
    machine_busy_seconds,
    process_tree,
)
from tests.benchmarks.compare.records import Run
from tests.benchmarks.compare.systems import System
from tests.benchmarks.compare.workloads import Workload

ROOT = Path(__file__).parents[3]
SPARE_BYTES = 5 << 30
"""Less than this left: the worker that has rested longest makes room for a new one."""
END_SECONDS = 90


class WorkerError(Exception):
    """A system failed: one line."""


@dataclass(frozen=True)
class Turn:
    """One system's run, and who else used the CPU meanwhile."""

    run: Run
    load_s: float
    version: str
    settings: dict[str, Any]
    rested_cpu_s: float
    """CPU seconds of the other loaded systems: they should rest."""
    foreign_cpu_s: float
    """CPU seconds of processes that are none of ours."""


class WorkerProcess:
    """One loaded system. Raises WorkerError where it cannot be loaded."""

    def __init__(
        self, system: System, options: LoadOptions, log: Path, deadline_seconds: float
    ) -> None:
        self.options = options
        self._name, self._log, self._deadline = system.name, log, deadline_seconds
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [system.python, "-m", "tests.benchmarks.compare.worker", system.driver]
                + [json.dumps(options.to_json())],
                cwd=ROOT,
                env={**os.environ, **system.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.loaded = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"{self._name}: has ended; see {self._log}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._deadline, self._kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self.end()
            raise WorkerError(f"{self._name}: ended without an answer; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.end()
            raise WorkerError(f"{self._name}: {answer['error']}; see {self._log}")
        return answer

    def end(self) -> None:
        """Lets it close by itself, then makes sure that nothing of it is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(END_SECONDS)
        self._kill()
        self._process.wait()
        self._process.stdout.close()

    def interrupt(self) -> None:
        """Asks it and what it started to end now, whatever they are doing: servers clean up."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
            self._process.wait(END_SECONDS)
            deadline = time.monotonic() + END_SECONDS
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)  # raises when nobody of the group is left
                time.sleep(0.1)

    def _kill(self) -> None:
        """The worker and what it started, which are a process group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Fleet:
    """Use as a context manager: all workers end with it."""

    def __init__(
        self,
        checkpoint: str,
        threads: int,
        log_directory: Path,
        *,
        turn_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """``turn_seconds``: a system that does not answer for so long has failed."""
        self._checkpoint, self._threads = checkpoint, threads
        self._logs, self._turn_seconds, self._say = log_directory, turn_seconds, say
        self._workers: dict[str, WorkerProcess] = {}
        """By driver, the one that rested longest first."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for driver in list(self._workers):
            worker = self._workers.pop(driver)
            if error is not None:
                worker.interrupt()
            worker.end()

    def take_turn(self, system: System, workload: Workload, salt: int) -> Turn:
        """Serves the workload once. Raises WorkerError; the system's process has ended then."""
        worker = self._worker_for(system, workload)
        others = [w for w in self._workers.values() if w is not worker]
        rested = {pid for other in others for pid in process_tree(other.pid)}
        family = process_tree(worker.pid) | {os.getpid()}
        before = cpu_seconds(rested), cpu_seconds(family), machine_busy_seconds()
        try:
            answer = worker.ask({"workload": workload.name, "salt": salt, "door": system.door})
        except WorkerError:
            del self._workers[system.driver]
            raise
        after = cpu_seconds(rested), cpu_seconds(family), machine_busy_seconds()
        rested_s, own_s, busy_s = (b - a for a, b in zip(before, after, strict=True))
        return Turn(
            run=Run.from_json(answer),
            load_s=worker.loaded["load_s"],
            version=worker.loaded["version"],
            settings=worker.loaded["settings"],
            rested_cpu_s=rested_s,
            foreign_cpu_s=max(0.0, busy_s - own_s - rested_s),
        )

    def _worker_for(self, system: System, workload: Workload) -> WorkerProcess:
        options = system.options_for(workload, self._checkpoint, self._threads)
        worker = self._workers.pop(system.driver, None)
        if worker is not None and worker.options != options:
            worker.end()
            worker = None
        if worker is None:
            self._make_room()
            short = system.driver.rpartition(".")[2]
            self._say(f"loading {short}")
            log = self._logs / f"{short}.log"
            worker = WorkerProcess(system, options, log, self._turn_seconds)
        self._workers[system.driver] = worker
        return worker

    def _make_room(self) -> None:
        while self._workers and available_bytes() < SPARE_BYTES:
            driver = next(iter(self._workers))
            self._say(f"memory is short: ending {driver.rpartition('.')[2]}")
            self._workers.pop(driver).end()
