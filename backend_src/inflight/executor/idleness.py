"""What the engine thread does while there is nothing to compute: it waits, and checks its books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

QUIET_SECONDS = 1.0
"""Without anything new, before the books are checked: 5 ms for 1,000 cached blocks, in which the
next request would wait, and every other thread of the process for Python."""


class Arrivals(Protocol):
    """The part of ``Inbox`` that is watched."""

    @property
    def is_quiet(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Books(Protocol):
    """The part of the KV cache that is checked."""

    def check_integrity(self, goes_on: Callable[[], bool]) -> None: ...


def rest(arrivals: Arrivals, books: Books) -> None:
    """Returns when something has arrived. In a spell of idleness that lasts, the books are checked
    once, until something arrives. Raises IntegrityError."""
    if arrivals.wait(QUIET_SECONDS):
        return
    books.check_integrity(lambda: arrivals.is_quiet)
    arrivals.wait()
