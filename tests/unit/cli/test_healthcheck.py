from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from inflight.cli.healthcheck import UnhealthyError, infer_one_token


class Server(HTTPServer):
    answer: tuple[int, bytes] = (200, b"")
    asked: tuple[str, dict[str, object]] = ("", {})


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked = (self.path, json.loads(body))
        status, answer = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(server: Server, status: int, body: bytes) -> None:
    server.answer = (status, body)
    infer_one_token(f"http://127.0.0.1:{server.server_port}", timeout_seconds=5)


def test_it_asks_the_engine_for_one_token(server: Server) -> None:
    check(server, 200, b'{"text_output": " I"}')
    path, request = server.asked
    assert path == "/v2/models/inflight_llm/generate"
    assert request["max_tokens"] == 1
    assert request["timeout_us"] == 5_000_000


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (400, b'{"error": "Stub process is not healthy"}', "status 400: Stub process is not"),
        (200, b'{"error": "expects exactly 1 response"}', "status 200: expects exactly 1"),
        (200, b"{}", "no text_output"),
        (200, b'{"text_output": "", "finish_reason": "timed_out"}', "no token within"),
        (502, b"<html>", "status 502, and no JSON object"),
        (200, b"[1]", "status 200, and no JSON object"),
    ],
)
def test_what_is_not_well(server: Server, status: int, body: bytes, text: str) -> None:
    with pytest.raises(UnhealthyError, match=text):
        check(server, status, body)


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(UnhealthyError, match="refused"):
        infer_one_token(f"http://127.0.0.1:{port}", timeout_seconds=5)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://127.0.0.1", "http://"])
def test_only_http_addresses(url: str) -> None:
    with pytest.raises(UnhealthyError, match="must be http://HOST:PORT"):
        infer_one_token(url, timeout_seconds=1)
