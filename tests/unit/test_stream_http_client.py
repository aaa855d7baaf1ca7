"""client/stream_http.py against a server that goes away: it never takes a part for the whole."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "client" / "stream_http.py"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(text: str, finish_reason: str) -> bytes:
    event = f'data: {{"text_output": "{text}", "finish_reason": "{finish_reason}"}}\n\n'.encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def run_against(answer: bytes) -> subprocess.CompletedProcess[str]:
    """The client's end when a server sends these bytes and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, str(CLIENT), "hello", "--url", url],
            capture_output=True,
            text=True,
            timeout=30,
        )
        thread.join()
    return done


def test_a_whole_answer() -> None:
    done = run_against(HEAD + chunk("hi", "") + chunk("", "length") + LAST_CHUNK)
    assert (done.returncode, done.stdout) == (0, "hi\n[length]\n")


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + chunk("hi", ""),
        HEAD + chunk("hi", "") + LAST_CHUNK,
        HEAD + chunk("hi", "")[:-4],
        HEAD + chunk("hi", "") + chunk("you", "")[:9],
        HEAD,
        b"",
    ],
    ids=["a piece", "a polite end", "within a piece", "within the next", "a head", "nothing"],
)
def test_an_answer_that_breaks_off_is_an_error(answer: bytes) -> None:
    done = run_against(answer)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
