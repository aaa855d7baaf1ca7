"""StreamPacer: when a delta of a stream is worth a response of its own."""

from __future__ import annotations

from inflight.api.response import Result

SENDING_SHARE = 0.25
"""Of the time, at most, sending deltas may take while streams are open."""
LONGEST_WAIT_SECONDS = 0.2
"""Between two responses of one stream that has something to say, however dear they are."""
_NEWEST_WEIGHT = 0.05
"""Of one response in the mean of what responses cost."""


class StreamPacer:
    """Holds back deltas when there are many; those of one stream merge. Not thread-safe.

    A response costs the server, the stub and the client the same whatever it carries, and they take
    it from the cores that compute. So between two responses of one stream passes the time in which
    responses to all open streams, at what they are measured to cost, take SENDING_SHARE of it: few
    streams get every token at once, many get some tokens together. The first delta of a stream
    always goes at once. Keeps at most one Result for each stream. Times are seconds of one
    monotonic clock.
    """

    def __init__(self) -> None:
        self._last_sent: dict[int, float] = {}
        self._held: dict[int, Result] = {}
        self._mean_cost = 0.0

    def push(self, stream_id: int, delta: Result, now: float) -> Result | None:
        """A new delta: what to send of this stream now, or None."""
        held = self._held.pop(stream_id, None)
        if held is not None:
            delta = held.merged_with(delta)
        last_sent = self._last_sent.get(stream_id)
        if last_sent is None or now - last_sent >= self._wait_seconds():
            self._last_sent[stream_id] = now
            return delta
        self._held[stream_id] = delta
        return None

    def sent(self, seconds: float) -> None:
        """A response took so long to send."""
        self._mean_cost += _NEWEST_WEIGHT * (seconds - self._mean_cost)

    def take_due(self, now: float) -> list[tuple[int, Result]]:
        """The held deltas whose time has come, by stream id."""
        wait = self._wait_seconds()
        due = [i for i in self._held if now - self._last_sent[i] >= wait]
        for stream_id in due:
            self._last_sent[stream_id] = now
        return [(stream_id, self._held.pop(stream_id)) for stream_id in due]

    def close(self, stream_id: int) -> Result | None:
        """The stream ends: what was still held of it, if anything. Unknown ids are none."""
        self._last_sent.pop(stream_id, None)
        return self._held.pop(stream_id, None)

    def seconds_to_next(self, now: float) -> float | None:
        """How long until a held delta is due; None when nothing is held."""
        if not self._held:
            return None
        first = min(self._last_sent[stream_id] for stream_id in self._held)
        return max(0.0, first + self._wait_seconds() - now)

    def _wait_seconds(self) -> float:
        wanted = len(self._last_sent) * self._mean_cost / SENDING_SHARE
        return min(wanted, LONGEST_WAIT_SECONDS)
