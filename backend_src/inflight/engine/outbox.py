"""Outbox: what the engine has said and nobody has taken yet; unsent deltas of a request merge.

So a slow reader never makes the engine wait, and the memory here is bounded by the requests in
flight: at most one Response each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from inflight.api.response import Response, Result
from inflight.errors import RequestError


class _Unsent:
    """The growing, not yet taken part of one request's answer."""

    __slots__ = ("client_id", "parts", "error")

    def __init__(self, client_id: str | None) -> None:
        self.client_id = client_id
        self.parts: list[Result] = []
        self.error: RequestError | None = None

    def response(self, request_id: int) -> Response:
        """An error wins over text that nobody has taken: it is the last word on the request."""
        if self.error is not None:
            return Response(request_id=request_id, client_id=self.client_id, error=self.error)
        merged = Result.merge(self.parts)
        return Response(request_id=request_id, client_id=self.client_id, result=merged)


class Outbox:
    """Thread-safe. The engine thread puts, readers take."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._unsent: dict[int, _Unsent] = {}
        self._ready: dict[int, None] = {}  # ids in order of readiness

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def put_batch(self, items: Iterable[tuple[int, str | None, Result]]) -> None:
        """Adds (request_id, client_id, result) of one iteration; wakes readers once."""
        with self._condition:
            for request_id, client_id, result in items:
                self._entry(request_id, client_id).parts.append(result)
                self._ready[request_id] = None
            self._condition.notify_all()

    def put_error(self, request_id: int, client_id: str | None, error: RequestError) -> None:
        with self._condition:
            self._entry(request_id, client_id).error = error
            self._ready[request_id] = None
            self._condition.notify_all()

    def take(self, request_id: int | None, timeout: float | None) -> list[Response]:
        """Waits until the request (None: any) has something to say, or ``timeout`` seconds."""

        def is_ready() -> bool:
            return bool(self._ready) if request_id is None else request_id in self._ready

        with self._condition:
            if not self._condition.wait_for(is_ready, timeout):
                return []
            taken = list(self._ready) if request_id is None else [request_id]
            for each in taken:
                del self._ready[each]
            unsent = [(each, self._unsent.pop(each)) for each in taken]
        return [entry.response(each) for each, entry in unsent]

    def _entry(self, request_id: int, client_id: str | None) -> _Unsent:
        entry = self._unsent.get(request_id)
        if entry is None:
            entry = self._unsent[request_id] = _Unsent(client_id)
        return entry
