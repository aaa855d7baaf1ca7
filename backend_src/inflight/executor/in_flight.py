"""InFlightClients: which callers' ids are in flight, so that none is used twice at once."""

from __future__ import annotations

import threading

from inflight.errors import DuplicateRequestError


class InFlightClients:
    """Thread-safe. A request is in flight from ``add`` until its final Response was taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client_ids: dict[int, str] = {}
        self._used: set[str] = set()

    def add(self, request_id: int, client_id: str | None) -> None:
        """Raises DuplicateRequestError when ``client_id`` is in flight already."""
        if client_id is None:
            return
        with self._lock:
            if client_id in self._used:
                raise DuplicateRequestError(
                    f"request id: {client_id[:80]!r} is in flight already; use another id"
                )
            self._used.add(client_id)
            self._client_ids[request_id] = client_id

    def remove(self, request_id: int) -> None:
        """An id that was never added is ignored: its request had no ``client_id``."""
        with self._lock:
            client_id = self._client_ids.pop(request_id, None)
            if client_id is not None:
                self._used.discard(client_id)
