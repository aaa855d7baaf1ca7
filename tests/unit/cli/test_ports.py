from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli.errors import StartupError
from inflight.cli.ports import Endpoints, check_ports


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_free_ports_pass() -> None:
    assert check_ports(Endpoints("127.0.0.1", *free_ports(3))) is None


def test_a_taken_port_names_its_option_and_its_holder(taken: int) -> None:
    http, metrics = free_ports(2)
    name = Path("/proc/self/comm").read_text().strip()
    with pytest.raises(StartupError) as raised:
        check_ports(Endpoints("127.0.0.1", http, taken, metrics))
    text = str(raised.value)
    assert text.startswith(f"--grpc-port {taken}: cannot listen on 127.0.0.1: Address already")
    assert f"by process {name} ({os.getpid()})" in text


def test_one_port_for_two_doors() -> None:
    (port, other) = free_ports(2)
    with pytest.raises(StartupError, match=f"--metrics-port {port}: the same port as --http-port"):
        check_ports(Endpoints("127.0.0.1", port, other, port))


def test_a_host_that_is_no_address() -> None:
    with pytest.raises(StartupError, match="--host 300.1.1.1: there is no such IPv4 address"):
        check_ports(Endpoints("300.1.1.1", *free_ports(3)))


def test_a_wildcard_is_called_by_loopback() -> None:
    assert Endpoints("0.0.0.0").reachable_host == "127.0.0.1"
    assert Endpoints("127.0.0.2").reachable_host == "127.0.0.2"
