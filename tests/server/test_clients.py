"""What users copy from, run as its own help says: the clients, and the perf_analyzer profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import ROOT, Client
from tests.server.reference import Reference

PROMPT = "The capital of France is"


def run_client(*arguments: str, answers: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        input=answers,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


@pytest.mark.parametrize("script", ["stream_grpc.py", "stream_http.py"])
def test_streaming_clients(client: Client, door: str, script: str, reference: Reference) -> None:
    url = client.grpc if script == "stream_grpc.py" else client.http
    options = ("--url", url, "--model", door, "--max-tokens", "8", PROMPT)
    done = run_client(f"client/{script}", *options)
    assert done.returncode == 0, done.stderr
    assert reference.greedy(PROMPT, 8).strip() in done.stdout
    assert "length" in done.stdout + done.stderr


def test_chat_remembers_what_was_said(client: Client) -> None:
    said = "My name is Ada.\nWhat is my name?\n/reset\nHello!\n/exit\n"
    done = run_client("client/chat.py", "--url", client.grpc, "--max-tokens", "24", answers=said)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 60
    assert "Traceback" not in done.stderr


def test_perf_analyzer_profile(client: Client, tmp_path: Path) -> None:
    export = ROOT / "results" / "perf_analyzer" / "stream.json"
    done = subprocess.run(
        [
            *("bash", "perf_analyzer_configs/run.sh", "-u", client.grpc),
            *("--concurrency-range", "2", "--measurement-request-count", "4"),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (experiment,) = json.loads(export.read_text())["experiments"]
    requests = experiment["requests"]
    assert len(requests) >= 4
    assert all(len(request["response_timestamps"]) > 2 for request in requests), "not streamed"
