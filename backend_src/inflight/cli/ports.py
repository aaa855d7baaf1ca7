"""The addresses the server listens on, and who has one of them when it is taken."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from inflight.cli.errors import StartupError

_LISTEN = "0A"  # the state's code in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Endpoints:
    """One host and the three ports, each the value of the option of its name."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002

    def ports(self) -> dict[str, int]:
        """Option name to port."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
        }

    @property
    def reachable_host(self) -> str:
        """The host to use from this machine: a wildcard address is listened on, not called."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host


def check_ports(endpoints: Endpoints) -> None:
    """Raises StartupError naming the option whose port is used twice or taken, and by whom."""
    options: dict[int, str] = {}
    for option, port in endpoints.ports().items():
        if port in options:
            raise StartupError(f"{option} {port}: the same port as {options[port]}")
        options[port] = option
        _check_port(option, endpoints.host, port)


def _check_port(option: str, host: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except socket.gaierror:
        raise StartupError(f"--host {host}: there is no such IPv4 address") from None
    except PermissionError:
        raise StartupError(
            f"{option} {port}: not permitted (ports below 1024 need privileges)"
        ) from None
    except OSError as error:
        holder = _listener(port)
        by = f" by {holder}" if holder else ""
        raise StartupError(
            f"{option} {port}: cannot listen on {host}: {error.strerror}{by}",
            remedy=f"give another {option}",
        ) from None


def _listener(port: int) -> str | None:
    """``process NAME (pid)`` that listens on the port; None where /proc does not tell us."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for directory in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(_target(link) in sockets for link in (directory / "fd").iterdir()):
                return f"process {(directory / 'comm').read_text().strip()} ({directory.name})"
        except OSError:
            continue  # ended meanwhile, or another user's
    return None


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None  # closed meanwhile


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(columns[9])
    return inodes
