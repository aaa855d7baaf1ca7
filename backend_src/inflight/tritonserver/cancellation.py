"""CancellationWatch: looks, a few requests at a time, whether their clients have gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from inflight.tritonserver.in_flight import InFlight, TritonRequest

SHARE_OF_TIME = 0.03
"""Of each period, how much may be spent looking. Each look is a round trip to the server that takes
cores away from the engine: a fifth of the time cost 32 streams a tenth of their tokens. What a
client costs that has left and is not noticed for 0.1 s is a row of a few iterations."""


class CancellationWatch:
    """Polls round robin. Triton calls nobody back on a cancellation, so somebody has to ask."""

    def __init__(
        self, in_flight: InFlight, period_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._in_flight = in_flight
        self._period = period_seconds
        self._clock = clock
        self._next_time = 0.0
        self._round: deque[TritonRequest] = deque()

    def poll(self) -> None:
        """Looks at the next requests of the round, at least one, if a period has passed."""
        started = self._clock()
        if started < self._next_time:
            return
        if not self._round:
            self._round.extend(self._in_flight.requests())
        deadline = started + SHARE_OF_TIME * self._period
        while self._round:
            request = self._round.popleft()
            if not request.cancelled and request.reply.is_client_gone():
                self._in_flight.cancel(request)
            if self._clock() >= deadline:
                break
        self._next_time = self._clock() + self._period
