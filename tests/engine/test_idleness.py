"""When the engine thread checks its books, in a world where time passes only in waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from inflight.api import KvCacheConfig
from inflight.executor.idleness import QUIET_SECONDS, rest
from inflight.kv_cache import KvCacheManager, KvExtent


class TimedArrivals:
    """An inbox in which something arrives at a known time."""

    def __init__(self, at: float) -> None:
        self.now = 0.0
        self._at = at

    @property
    def is_quiet(self) -> bool:
        return self.now < self._at

    def wait(self, timeout: float | None = None) -> bool:
        end = self._at if timeout is None else min(self._at, self.now + timeout)
        self.now = max(self.now, end)
        return not self.is_quiet


class TimedBooks:
    """A KV cache whose check takes 100 looks of 10 ms."""

    def __init__(self, arrivals: TimedArrivals) -> None:
        self.num_looks: list[int] = []
        self._arrivals = arrivals

    def check_integrity(self, goes_on: Callable[[], bool]) -> None:
        self.num_looks.append(0)
        while goes_on() and self.num_looks[-1] < 100:
            self.num_looks[-1] += 1
            self._arrivals.now += 0.01


def looks_until(arrival: float) -> tuple[list[int], float]:
    """Of each check the looks; and how long the arrival waited."""
    arrivals = TimedArrivals(arrival)
    books = TimedBooks(arrivals)
    rest(arrivals, books)
    return books.num_looks, arrivals.now - arrival


def test_the_books_are_not_checked_between_requests_that_follow_closely() -> None:
    assert looks_until(0.9 * QUIET_SECONDS) == ([], 0.0)


def test_the_books_are_checked_once_when_nobody_comes() -> None:
    assert looks_until(QUIET_SECONDS + 60) == ([100], 0.0)


def test_whoever_comes_ends_the_check() -> None:
    (num_looks,), waited = looks_until(QUIET_SECONDS + 0.095)
    assert num_looks == 10 and waited < 0.01


def test_a_check_of_a_full_cache_asks_often_whether_to_go_on() -> None:
    kv = KvCacheManager(300, KvCacheConfig(tokens_per_block=4))
    extent = KvExtent(1, 0, np.arange(1200, dtype=np.int32))
    kv.open(1)
    kv.reserve([extent])
    kv.commit([extent])
    asked = 0

    def goes_on() -> bool:
        nonlocal asked
        asked += 1
        return asked < 100

    kv.check_integrity(goes_on)
    assert asked == 100 + 1, "once in the tree, and once more after it"
