"""One life of the server: started, ready, dead."""

from __future__ import annotations

import http.client
import os
import subprocess
import time
from collections.abc import Callable

from inflight.cli.exec_guarded import guarded
from inflight.cli.launch import Launch
from inflight.cli.processes import Child, children_of, kill_group
from inflight.cli.server_log import ServerLog
from inflight.tritonserver.shutdown_signal import SHUTDOWN_SIGNAL

ENGINE_MODEL = "inflight_llm"
_PROBE_SECONDS = 2.0


class ServerProcess:
    """A running ``tritonserver`` in a process group of its own; it dies with this process.

    Construct it in the main thread: the death signal follows the thread that started it.
    """

    def __init__(self, launch: Launch, show: Callable[[str], None]) -> None:
        self._launch = launch
        self._process = subprocess.Popen(
            guarded(launch.command),
            env=dict(launch.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.log = ServerLog(self._process.stdout, show)
        self.started_at = time.monotonic()
        self._stubs: tuple[Child, ...] = ()
        self._is_gone = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        """True when the server says that it and all its models are ready."""
        endpoints = self._launch.endpoints
        connection = http.client.HTTPConnection(
            endpoints.reachable_host, endpoints.http_port, timeout=_PROBE_SECONDS
        )
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def watch_stubs(self) -> None:
        """From now on the death of any present stub counts; call it when the server is ready.

        Earlier they come and go: the server asks each model for its configuration in a stub first.
        """
        self._stubs = children_of(self.pid)

    def death(self) -> str | None:
        """What died, in one phrase; None while the server and its stubs live."""
        code = self._process.poll()
        if code is not None:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            return f"the server ended {how}"
        dead = [stub for stub in self._stubs if not stub.is_alive]
        if dead:
            return f"the stub of {', '.join(stub.name for stub in dead)} died"
        return None

    def announce_stop(self) -> bool:
        """Tells the engine's stub to answer everyone now; True when there is one to tell.

        After ``terminate`` it is too late: the server waits for the requests in flight and ends
        hard when its exit timeout is over.
        """
        engines = [stub for stub in self._stubs if stub.name == ENGINE_MODEL and stub.is_alive]
        for engine in engines:
            os.kill(engine.pid, SHUTDOWN_SIGNAL)
        return bool(engines)

    def terminate(self) -> None:
        """Asks the server to unload its models and exit. The stubs are the server's to end."""
        self._process.terminate()

    def has_exited(self) -> bool:
        """True when the server itself has; its stubs may live a little longer."""
        return self._process.poll() is not None

    def kill(self) -> bool:
        """SIGKILL to server and stubs; True when all are gone. Closes every client's connection.

        May be called again; the group's id is used no more once the group is gone.
        """
        if not self._is_gone:
            self._is_gone = kill_group(self.pid)
            self._process.wait()
            self.log.close()
        return self._is_gone
