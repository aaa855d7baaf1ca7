"""A program that behaves, to a supervisor, as tritonserver does; run as a script.

It answers ``/v2/health/ready`` with 200 also when its stub has died, starts one child whose command
line names a model as a stub's does, keeps a region of "shared memory", and leaves at SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

MODEL = "inflight_llm"


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/v2/health/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


STUB = """
import os, signal, sys, time
def note(event):
    with open(sys.argv[3], "a") as events:
        events.write(event + "\\n")
signal.signal(signal.SIGUSR1, lambda number, frame: note("told"))
note("listening")
while os.getppid() == int(sys.argv[2]):
    time.sleep(1.0)
"""


def model_path(port: int) -> str:
    return f"/models-{port}/{MODEL}/1/model.py"


def start_stub(port: int, events: Path) -> subprocess.Popen[bytes]:
    """A stub outlives its server for a moment, as real ones do."""
    arguments = (model_path(port), str(os.getpid()), str(events))
    return subprocess.Popen([sys.executable, "-S", "-c", STUB, *arguments])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--region", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument(
        "--behave", choices=["well", "ignore-sigterm", "never-ready", "fail"], default="well"
    )
    options = parser.parse_args()

    def note(event: str) -> None:
        with options.events.open("a") as events:
            events.write(event + "\n")

    note("start")
    options.region.write_bytes(b"\0" * 1024)
    if options.behave == "fail":
        print(
            'E1130 00:24:04.116182 9861 model_lifecycle.cc:642] "failed to load '
            f"'{MODEL}' version 1: Internal: ConfigError: dtype: 'int7' is not known"
            '\\n\\nAt:\\n  /models/model.py(3): initialize\\n"'
        )
        sys.exit(1)
    stub = start_stub(options.port, options.events)
    if options.behave == "never-ready":
        Health.status = 400

    def leave(number: int, frame: object) -> None:
        note("terminated")
        stub.kill()
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.behave == "ignore-sigterm" else leave)
    HTTPServer.allow_reuse_address = True
    server = HTTPServer(("127.0.0.1", options.port), Health)
    server.timeout = 0.05
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        server.handle_request()


if __name__ == "__main__":
    main()
