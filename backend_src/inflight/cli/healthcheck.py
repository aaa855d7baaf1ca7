"""Is the service well? Only an answer tells: Triton reports ready also when a stub has died."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from inflight.errors import InflightError

_MODEL = "inflight_llm"
_REQUEST = {"text_input": "health", "max_tokens": 1, "priority": 1.0}
_MOST_BYTES = 1 << 16


class UnhealthyError(InflightError):
    """The server does not answer, or not with a token. The text is one line."""


def infer_one_token(url: str, timeout_seconds: float) -> None:
    """One token from the engine, through the whole of the server.

    ``url``: ``http://HOST:PORT``. Raises UnhealthyError unless the server generated a token within
    ``timeout_seconds`` (of each step of the exchange).
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise UnhealthyError(f"--url {url}: must be http://HOST:PORT")
    connection = http.client.HTTPConnection(
        parts.hostname, parts.port or 8000, timeout=timeout_seconds
    )
    try:
        # The server does not see us leave: without a limit of its own an unanswered check would
        # wait in its queue, and the next ones behind it.
        ask = _REQUEST | {"timeout_us": int(timeout_seconds * 1e6)}
        connection.request("POST", f"/v2/models/{_MODEL}/generate", json.dumps(ask))
        reply = connection.getresponse()
        body = reply.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UnhealthyError(f"{url}: {error or type(error).__name__}") from None
    finally:
        connection.close()
    _check(reply.status, body)


def _check(status: int, body: bytes) -> None:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UnhealthyError(f"status {status}, and no JSON object")
    if status != 200 or "text_output" not in answer:
        raise UnhealthyError(f"status {status}: {answer.get('error', 'no text_output')}")
    if answer.get("finish_reason") == "timed_out":
        raise UnhealthyError("no token within the time limit")
