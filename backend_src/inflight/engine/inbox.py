"""Inbox: what other threads ask of the engine thread (new requests, cancellations, shutdown)."""

from __future__ import annotations

import threading

from inflight.engine.record import RequestRecord


class Inbox:
    """Thread-safe; the engine thread is the only taker."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._new: list[RequestRecord] = []
        self._cancelled: set[int] = set()
        self._closed = False

    @property
    def num_new(self) -> int:
        """Requests that the engine has not taken yet."""
        return len(self._new)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def put(self, record: RequestRecord) -> bool:
        """False (and nothing put) when the inbox is closed."""
        with self._condition:
            if self._closed:
                return False
            self._new.append(record)
            self._condition.notify()
            return True

    def cancel(self, request_id: int) -> None:
        with self._condition:
            self._cancelled.add(request_id)
            self._condition.notify()

    def close(self) -> None:
        """No more requests; wakes the engine thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def take_new(self) -> list[RequestRecord]:
        with self._condition:
            taken, self._new = self._new, []
            return taken

    def take_cancelled(self) -> set[int]:
        """Ids asked to be cancelled since the last call; they may be unknown to the engine."""
        if not self._cancelled:  # the common case, read without the lock
            return set()
        with self._condition:
            taken, self._cancelled = self._cancelled, set()
            return taken

    @property
    def is_quiet(self) -> bool:
        """Nothing to take, and not closed."""
        return not (self._new or self._cancelled or self._closed)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until there is something to take or the inbox is closed, ``timeout`` seconds at
        most (None: for ever). Whether it is so."""
        with self._condition:
            return self._condition.wait_for(lambda: not self.is_quiet, timeout)
