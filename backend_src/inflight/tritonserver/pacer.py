"""StreamPacer: when a delta of a stream is worth a response of its own."""

from __future__ import annotations

from inflight.api.response import Result

MAX_UNPACED_RATE = 600.0
"""Deltas per second, over all streams, up to which each one is sent at once."""
FLUSH_SECONDS = 0.03
"""Above that rate: the least time between two responses of one stream."""
_RATE_WINDOW_SECONDS = 0.25


class StreamPacer:
    """Holds back deltas at high load; those of one stream merge. Not thread-safe.

    A response costs the server and the stub the same whatever it carries, so at load several tokens
    travel together. The first delta of a stream always goes at once. Keeps at most one Result for
    each stream. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._last_sent: dict[int, float] = {}
        self._held: dict[int, Result] = {}
        self._window_start = 0.0
        self._window_count = 0
        self._rate = 0.0

    def push(self, stream_id: int, delta: Result, now: float) -> Result | None:
        """A new delta: what to send of this stream now, or None."""
        self._count(now)
        held = self._held.pop(stream_id, None)
        if held is not None:
            delta = held.merged_with(delta)
        last_sent = self._last_sent.get(stream_id)
        is_due = last_sent is None or now - last_sent >= FLUSH_SECONDS
        if is_due or self._rate <= MAX_UNPACED_RATE:
            self._last_sent[stream_id] = now
            return delta
        self._held[stream_id] = delta
        return None

    def take_due(self, now: float) -> list[tuple[int, Result]]:
        """The held deltas whose time has come, by stream id."""
        due = [i for i in self._held if now - self._last_sent[i] >= FLUSH_SECONDS]
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
        return max(0.0, first + FLUSH_SECONDS - now)

    def _count(self, now: float) -> None:
        """The rate is that of the last full window, or of this one if it is higher already."""
        elapsed = now - self._window_start
        if elapsed >= _RATE_WINDOW_SECONDS:
            self._rate = self._window_count / elapsed
            self._window_start, self._window_count = now, 0
        self._window_count += 1
        self._rate = max(self._rate, self._window_count / _RATE_WINDOW_SECONDS)
