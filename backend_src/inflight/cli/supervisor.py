"""Keeps one server running: start, watch, start again, stop.

Triton neither restarts a stub that died nor reports it: health stays at 200 and requests in flight
wait for ever. So a dead stub ends the whole server here, which closes every client's connection,
and a new server is started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from inflight.cli.errors import StartupError
from inflight.cli.launch import Launch
from inflight.cli.restarts import RestartBudget, RestartPolicy
from inflight.cli.server_process import ServerProcess
from inflight.cli.shared_memory import SharedMemoryPrefix
from inflight.cli.stop_signals import StopRequested, StopSignals


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    ready_deadline: float = 300.0
    ready_poll: float = 0.2
    watch_poll: float = 0.5
    still_loading: float = 15.0
    answer_everyone: float = 0.7
    kill_after_exit_timeout: float = 3.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """How one life of the server ended when nobody had asked for it."""

    reason: str
    ready_seconds: float | None
    """How long it had been ready; None if it never was."""


class Supervisor:
    """``say`` takes our own lines, ``show`` the server's; ``on_ready`` gets the seconds it took."""

    def __init__(
        self,
        launch: Launch,
        shared_memory: SharedMemoryPrefix,
        *,
        say: Callable[[str], None],
        show: Callable[[str], None],
        on_ready: Callable[[float], None],
        policy: RestartPolicy | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._launch = launch
        self._shared_memory = shared_memory
        self._say = say
        self._show = show
        self._on_ready = on_ready
        self._policy = policy or RestartPolicy()
        self._timing = timing or Timing()

    def run(self) -> None:
        """Returns after a requested stop. Call it in the main thread.

        Raises StartupError when the first start fails, and when a server died and is not to be
        started again. Nothing of the server is left running in any case.
        """
        with StopSignals() as signals:
            try:
                self._keep_alive(signals)
            except StopRequested:
                self._say("stopped")

    def _keep_alive(self, signals: StopSignals) -> NoReturn:
        budget = RestartBudget(self._policy)
        was_ever_ready = False
        while True:
            failure = self._live_once(signals)
            was_ever_ready |= failure.ready_seconds is not None
            if not was_ever_ready:
                raise StartupError(failure.reason)  # a restart would fail in the same way
            delay = budget.delay_after_failure(failure.ready_seconds or 0.0)
            if delay is None:
                raise StartupError(f"{failure.reason}; not started again")
            self._say(f"{failure.reason}; starting it again in {delay:.1f} s")
            signals.sleep(delay)

    def _live_once(self, signals: StopSignals) -> _Failure:
        server = ServerProcess(self._launch, self._show)
        try:
            return self._await_ready(server, signals) or self._watch(server, signals)
        except StopRequested:
            self._stop(server, signals)
            raise
        finally:
            if not server.kill():
                self._say(f"processes of group {server.pid} outlive SIGKILL")
            self._shared_memory.clear()

    def _await_ready(self, server: ServerProcess, signals: StopSignals) -> _Failure | None:
        """None when the server is ready."""
        timing = self._timing
        say_next = timing.still_loading
        while not server.is_ready():
            seconds = time.monotonic() - server.started_at
            death = server.death()
            if death is None and seconds > timing.ready_deadline:
                death = f"the server was not ready after {seconds:.0f} s"
            if death is not None:
                server.kill()  # first, so that the log is whole
                return _Failure(f"{death}: {server.log.reason()}", ready_seconds=None)
            if seconds > say_next:
                self._say(f"still loading ({seconds:.0f} s)")
                say_next += timing.still_loading
            signals.sleep(timing.ready_poll)
        server.watch_stubs()
        self._on_ready(time.monotonic() - server.started_at)
        return None

    def _watch(self, server: ServerProcess, signals: StopSignals) -> _Failure:
        ready_at = time.monotonic()
        while True:
            signals.sleep(self._timing.watch_poll)
            death = server.death()
            if death is not None:
                return _Failure(death, ready_seconds=time.monotonic() - ready_at)

    def _stop(self, server: ServerProcess, signals: StopSignals) -> None:
        """A word to the engine, SIGTERM, patience; for what is left then the caller has SIGKILL.

        With a gRPC stream open, even an idle one, the server does not exit after its own timeout.
        """
        self._say("stopping; a second signal ends it at once")
        if server.announce_stop() and signals.wait(self._timing.answer_everyone) is not None:
            return
        server.terminate()
        patience = self._launch.exit_timeout_seconds + self._timing.kill_after_exit_timeout
        deadline = time.monotonic() + patience
        while not server.has_exited() and time.monotonic() < deadline:
            if signals.wait(0.1) is not None:
                return
