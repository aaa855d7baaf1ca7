"""The supervisor with the real server: what dies comes back, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import GrpcStream, Server
from tests.server.tiny_checkpoint import make_tiny_checkpoint

LONG = {"text_input": "hello", "max_tokens": 900, "end_id": -1, "stream": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def running(tmp_path: Path, checkpoint: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server.log", "--model", str(checkpoint)).wait_ready()
    yield server
    server.stop()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def wait_until_back(server: Server, seconds: float = 60) -> float:
    began = time.monotonic()
    while True:
        assert time.monotonic() - began < seconds, server.log.read_text()[-3000:]
        try:
            ask = {"text_input": "hi", "max_tokens": 2, "end_id": -1}
            status, _ = server.client.call("/v2/models/inflight_llm/generate", ask, timeout=5)
            if status == 200:
                return time.monotonic() - began
        except OSError:
            pass
        time.sleep(0.2)


@pytest.mark.parametrize("victim", ["stub", "server"])
def test_kill_under_load_brings_service_back(running: Server, victim: str) -> None:
    before = running.stub_of("inflight_llm")
    streams = [GrpcStream(running.client) for _ in range(4)]
    try:
        for stream in streams:
            stream.ask("inflight_llm", **LONG)
            assert stream.next().text is not None
        pid = before
        if victim == "server":
            pid = next(
                pid for pid, command in running.descendants().items() if "/tritonserver " in command
            )
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            last = stream.events(timeout=40)[-1]
            assert last.error is not None, "a client in flight hears of it"
    finally:
        for stream in streams:
            stream.close(cancel=True)
    print(f"kill -9 of the {victim}: answers again after {wait_until_back(running):.1f} s")
    assert running.stub_of("inflight_llm") != before


def test_sigterm_with_an_open_stream_ends_cleanly(tmp_path: Path, checkpoint: Path) -> None:
    before = shared_memory()
    server = Server(tmp_path / "server.log", "--model", str(checkpoint)).wait_ready()
    children = server.descendants()
    stream = GrpcStream(server.client)
    stream.ask("inflight_llm", **LONG)
    stream.next()
    began = time.monotonic()
    assert server.stop() == 0, server.log.read_text()[-3000:]
    assert time.monotonic() - began < 25
    stream.close(cancel=True)
    deadline = time.monotonic() + 3  # whoever adopts an ended process needs a moment to bury it
    while left := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.05)
    assert shared_memory() <= before


def test_no_restart_ends_with_an_error(tmp_path: Path, checkpoint: Path) -> None:
    options = ("--model", str(checkpoint), "--no-restart")
    server = Server(tmp_path / "server.log", *options).wait_ready()
    os.kill(server.stub_of("postprocessing"), signal.SIGKILL)
    assert server.process.wait(40) != 0
    server.stop()


def test_a_port_in_use_is_named(running: Server, tmp_path: Path, checkpoint: Path) -> None:
    second = Server(tmp_path / "second.log", "--model", str(checkpoint))
    second.stop()
    taken = str(running.client.http_port)
    third = Server(tmp_path / "third.log", "--model", str(checkpoint), "--http-port", taken)
    assert third.process.wait(60) != 0
    third.stop()
    assert f"{taken}" in third.log.read_text() and "http-port" in third.log.read_text()
