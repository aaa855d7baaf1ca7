"""The door that the streaming stage of the GPU suite opens; nothing is served."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import streaming, streaming_executor, streaming_server
from tests.gpu.budget import END_VARIABLE
from tests.gpu.streaming_server import ServerDoor, ServerMissingError, ServerNotReadyError

pytestmark = pytest.mark.numeric


class Executor:
    def __init__(self, checkpoint: Path, keys: object) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ServerMissingError("no wheel"), "skipped"),
        (ServerNotReadyError("the server is not ready: exit"), "failed"),
    ],
)
def test_without_a_server_the_executor_streams(
    error: Exception,
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(streaming_server, "ServerDoor", refuse)
    monkeypatch.setattr(streaming_executor, "ExecutorDoor", Executor)
    assert isinstance(streaming._open_door(tmp_path, tmp_path, {}), Executor)
    row = json.loads(capsys.readouterr().out)
    assert (row["what"], row["outcome"]) == ("tritonserver", outcome)
    assert row["note"] == f"{error}; the Executor in this process instead"


def test_a_server_gets_what_the_stage_does_not_need_for_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that never says that it is ready is ended."""
    monkeypatch.setenv(END_VARIABLE, str(time.monotonic() + streaming.FALLBACK_SECONDS + 0.5))
    monkeypatch.setattr(streaming_server, "server_python", lambda folder: "/bin/sleep")
    monkeypatch.setattr(streaming_server, "_look_first", lambda *arguments: None)
    started: list[Any] = []
    really_start = streaming_server.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(really_start(["sleep", "600"], **options))
        return started[0]

    monkeypatch.setattr(streaming_server.subprocess, "Popen", start)
    began = time.monotonic()
    with pytest.raises(ServerNotReadyError, match="not ready: no output"):
        ServerDoor(tmp_path, tmp_path, {}, streaming.seconds_left() - streaming.FALLBACK_SECONDS)
    assert time.monotonic() - began < 10 and started[0].poll() is not None
