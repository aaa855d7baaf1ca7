"""Backlog: what waits to be tokenized, and the most that may."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from inflight.errors import QueueFullError
from inflight.tritonserver.parsed import RawRequest

MAX_REQUESTS = 4096
MAX_PROMPT_SIZE = 1 << 26
"""Characters and token ids of all prompts together; at most four bytes of memory each."""


class Backlog:
    """Thread-safe. Requests are held whole until a thread is free for them, and it is the clients
    that choose how many there are and how large."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_requests = 0
        self._prompt_size = 0

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def enter(self, raw: RawRequest) -> None:
        """Raises QueueFullError where there is no room. An empty backlog takes any request."""
        size = _prompt_size(raw)
        with self._lock:
            if self._num_requests >= MAX_REQUESTS or (
                self._num_requests and self._prompt_size + size > MAX_PROMPT_SIZE
            ):
                raise QueueFullError(
                    f"{self._num_requests} requests with {self._prompt_size} characters wait to be "
                    "tokenized already; try again later"
                )
            self._num_requests += 1
            self._prompt_size += size

    def leave(self, raw: RawRequest) -> None:
        """For each ``enter`` that did not raise, once."""
        with self._lock:
            self._num_requests -= 1
            self._prompt_size -= _prompt_size(raw)


def _prompt_size(raw: RawRequest) -> int:
    return sum(map(_size_of, raw.elements))


def _size_of(element: Mapping[str, Any]) -> int:
    return sum(len(element.get(name, ())) for name in ("text_input", "messages", "input_ids"))
