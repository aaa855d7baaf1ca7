"""When requests come: as a trace says (open), or one for each that has ended (closed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inflight.simulator.trace import TraceRequest


class Arrivals(Protocol):
    """Hands out the requests of a trace in order. The simulation asks between iterations."""

    def next_arrival(self, now: float, num_in_engine: int) -> float | None:
        """When the next request arrives (perhaps before ``now``), if nothing ends until then;
        None: it waits for an end, or there is none left."""
        ...

    def take(self) -> TraceRequest:
        """The next request, which has arrived."""
        ...


class OpenArrivals:
    """Each request at its own time, whatever became of the ones before it."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        """``trace``: in order of arrival."""
        self._trace = trace
        self._num_taken = 0

    def next_arrival(self, now: float, num_in_engine: int) -> float | None:
        if self._num_taken == len(self._trace):
            return None
        return self._trace[self._num_taken].arrival

    def take(self) -> TraceRequest:
        self._num_taken += 1
        return self._trace[self._num_taken - 1]


class ClosedArrivals:
    """So many clients, each of which sends its next request when its last one has ended."""

    def __init__(self, trace: Sequence[TraceRequest], concurrency: int) -> None:
        """``concurrency``: >= 1; arrival times of ``trace`` do not count."""
        assert concurrency >= 1
        self._trace = trace
        self._concurrency = concurrency
        self._num_taken = 0

    def next_arrival(self, now: float, num_in_engine: int) -> float | None:
        if self._num_taken == len(self._trace) or num_in_engine >= self._concurrency:
            return None
        return now

    def take(self) -> TraceRequest:
        self._num_taken += 1
        return self._trace[self._num_taken - 1]
