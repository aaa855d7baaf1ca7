"""The supervisor with a fake server: real processes, real signals, short times."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from inflight.cli.errors import StartupError
from inflight.cli.launch import Launch
from inflight.cli.ports import Endpoints
from inflight.cli.processes import children_of
from inflight.cli.restarts import RestartPolicy
from inflight.cli.shared_memory import SharedMemoryPrefix
from inflight.cli.supervisor import Supervisor, Timing
from tests.fakes import fake_tritonserver

QUICK = Timing(
    ready_deadline=60.0,
    ready_poll=0.02,
    watch_poll=0.05,
    answer_everyone=0.05,
    kill_after_exit_timeout=0.3,
)
ROOT = Path(__file__).parents[3]
AT_ONCE = RestartPolicy(first_delay_seconds=0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Bench:
    """One supervised fake server; each ``on_ready`` pops and runs the next of ``acts``."""

    directory: Path
    behave: str = "well"
    policy: RestartPolicy = AT_ONCE
    timing: Timing = QUICK
    acts: list[Callable[[], None]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    @property
    def events(self) -> list[str]:
        return (self.directory / "events").read_text().split()

    @property
    def starts(self) -> int:
        return self.events.count("start")

    def run(self) -> None:
        shared = self.directory / "shm"
        shared.mkdir()
        with SharedMemoryPrefix(shared) as memory:
            arguments = (
                ("--port", self.port),
                ("--region", shared / f"{memory.prefix}region"),
                ("--events", self.directory / "events"),
                ("--behave", self.behave),
            )
            words = (str(word) for pair in arguments for word in pair)
            launch = Launch(
                command=(sys.executable, fake_tritonserver.__file__, *words),
                environment=dict(os.environ),
                endpoints=Endpoints(http_port=self.port),
                exit_timeout_seconds=0.3,
            )
            Supervisor(
                launch,
                memory,
                say=self.said.append,
                show=self.shown.append,
                on_ready=lambda seconds: self.acts.pop(0)(),
                policy=self.policy,
                timing=self.timing,
            ).run()
        assert list(shared.iterdir()) == [], "shared memory is left behind"

    def left_running(self) -> list[int]:
        """Servers and stubs of this bench, wherever they are in the tree of processes."""
        marks = (str(self.directory).encode(), fake_tritonserver.model_path(self.port).encode())
        return [
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if process.name != str(os.getpid()) and any(m in command_line(process) for m in marks)
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.left_running() == [], "processes are left behind"


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


def running_server() -> int:
    """The fake server that this process has started."""
    servers = [
        child.pid
        for child in children_of(os.getpid())
        if fake_tritonserver.__file__.encode() in command_line(Path(f"/proc/{child.pid}"))
    ]
    assert len(servers) == 1
    return servers[0]


def kill_server() -> None:
    os.kill(running_server(), signal.SIGKILL)


def kill_stub() -> None:
    (stub,) = children_of(running_server())
    assert stub.name == fake_tritonserver.MODEL
    os.kill(stub.pid, signal.SIGKILL)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_lets_the_server_leave_by_itself(bench: Bench) -> None:
    bench.acts = [ask_to_stop]
    bench.run()
    assert bench.starts == 1
    assert bench.said[-1] == "stopped"


def test_the_engine_is_told_before_the_server_is_terminated(bench: Bench) -> None:
    def stop_when_the_engine_listens() -> None:
        while "listening" not in bench.events:
            time.sleep(0.02)
        ask_to_stop()

    bench.timing = replace(QUICK, answer_everyone=1.0)
    bench.acts = [stop_when_the_engine_listens]
    bench.run()
    assert bench.events == ["start", "listening", "told", "terminated"]


def test_ctrl_c_is_a_stop_too(bench: Bench) -> None:
    bench.acts = [lambda: os.kill(os.getpid(), signal.SIGINT)]
    bench.run()
    assert bench.said[-1] == "stopped"


def test_a_server_that_ignores_sigterm_is_killed_in_time(bench: Bench) -> None:
    bench.behave = "ignore-sigterm"
    began = 0.0

    def stop() -> None:
        nonlocal began
        began = time.monotonic()
        ask_to_stop()

    bench.acts = [stop]
    bench.run()
    patience = 0.3 + QUICK.kill_after_exit_timeout
    assert patience <= time.monotonic() - began < 30


def test_a_second_signal_kills_at_once(bench: Bench) -> None:
    bench.behave = "ignore-sigterm"
    bench.timing = replace(QUICK, kill_after_exit_timeout=60.0)

    def stop_twice() -> None:
        ask_to_stop()
        os.kill(os.getpid(), signal.SIGINT)

    bench.acts = [stop_twice]
    began = time.monotonic()
    bench.run()
    assert time.monotonic() - began < 30


def test_a_stop_while_the_server_loads(bench: Bench) -> None:
    bench.behave = "never-ready"
    bench.timing = replace(QUICK, still_loading=0.3)
    bench.said = StoppingList()
    bench.run()
    assert bench.said[0].startswith("still loading")
    assert bench.said[-1] == "stopped"


class StoppingList(list[str]):
    """Asks for a stop at the first line said."""

    def append(self, line: str) -> None:
        if not self:
            ask_to_stop()
        super().append(line)


def test_a_dead_stub_brings_a_whole_new_server(bench: Bench) -> None:
    bench.acts = [kill_stub, ask_to_stop]
    bench.run()
    assert bench.starts == 2
    assert bench.said[0].startswith("the stub of inflight_llm died; starting it again")


def test_a_killed_server_is_started_again(bench: Bench) -> None:
    bench.acts = [kill_server, kill_server, ask_to_stop]
    bench.run()
    assert bench.starts == 3
    assert bench.said[0].startswith("the server ended by signal 9; starting it again")


def test_no_restart_raises_at_the_first_death(bench: Bench) -> None:
    bench.policy = RestartPolicy(enabled=False)
    bench.acts = [kill_stub]
    with pytest.raises(StartupError, match="the stub of inflight_llm died; not started again"):
        bench.run()
    assert bench.starts == 1


def test_it_gives_up_after_quick_failures_in_a_row(bench: Bench) -> None:
    bench.policy = RestartPolicy(most_quick_failures=2, first_delay_seconds=0.01)
    bench.acts = [kill_server] * 3
    with pytest.raises(StartupError, match="not started again"):
        bench.run()
    assert bench.starts == 3


def test_a_first_start_that_fails_says_what_the_log_says(bench: Bench) -> None:
    bench.behave = "fail"
    with pytest.raises(StartupError, match=r"exit code 1: ConfigError: dtype: 'int7'") as raised:
        bench.run()
    assert "model.py" not in str(raised.value)
    assert bench.starts == 1, "the same configuration would fail in the same way"


def test_readiness_has_a_deadline(bench: Bench) -> None:
    bench.behave = "never-ready"
    bench.timing = replace(QUICK, ready_deadline=0.3)
    with pytest.raises(StartupError, match="the server was not ready after"):
        bench.run()


KILLED_SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from tests.unit.cli.test_supervisor import Bench
end = lambda: os.kill(os.getpid(), signal.SIGKILL)
Bench(Path(sys.argv[1]), port=int(sys.argv[2]), acts=[end]).run()
"""


def test_the_server_dies_with_a_killed_supervisor(bench: Bench) -> None:
    command = [sys.executable, "-c", KILLED_SUPERVISOR, str(bench.directory), str(bench.port)]
    ended = subprocess.run(command, cwd=ROOT, timeout=30, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert bench.starts == 1
    deadline = time.monotonic() + 10
    while bench.left_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert bench.left_running() == []
