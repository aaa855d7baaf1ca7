"""StreamPacer: when a delta of a stream is worth a response of its own."""

from __future__ import annotations

from inflight.api.response import Result

SENDING_SHARE = 0.25
"""Of the time of the thread that sends, at most, deltas may take while streams are open."""
MACHINE_SHARE = 0.04
"""Of the time of all cores, at most, for the same."""
CPU_OF_ALL = 3.0
"""For each CPU second that sending takes here, so many are spent on it in all: the server passes
the response on and a client reads it, in what was measured on one machine about as long each."""
LONGEST_WAIT_SECONDS = 0.2
"""Between two responses of one stream that has something to say, however dear they are."""
_NEWEST_WEIGHT = 0.05
"""Of one response in the mean of what responses cost."""


class StreamPacer:
    """Holds back deltas when there are many; those of one stream merge. Not thread-safe.

    A response costs the server, the stub and the client the same whatever it carries, and they take
    it from the cores that compute. So between two responses of one stream passes the time in which
    responses to all open streams, at what they are measured to cost, take their share of it: few
    streams get every token at once, many get some tokens together. The first delta of a stream
    always goes at once. Times are seconds of one monotonic clock.

    How long sending takes and how much of a CPU are two things: a thread that has slept waits for
    a core that computes, and the fewer cores there are the more a response takes of them.
    """

    def __init__(self, num_cores: int) -> None:
        """``num_cores``: those that sending and computing have together."""
        self._share_of_cores = MACHINE_SHARE * num_cores / CPU_OF_ALL
        self._last_sent: dict[int, float] = {}
        self._held: dict[int, list[Result]] = {}
        self._mean_seconds = 0.0
        self._mean_cpu_seconds = 0.0

    def push(self, stream_id: int, delta: Result, now: float) -> Result | None:
        """A new delta: what to send of this stream now, or None."""
        last_sent = self._last_sent.get(stream_id)
        if last_sent is not None and now - last_sent < self._wait_seconds():
            self._held.setdefault(stream_id, []).append(delta)
            return None
        self._last_sent[stream_id] = now
        return Result.merge([*self._held.pop(stream_id, ()), delta])

    def sent(self, seconds: float, cpu_seconds: float) -> None:
        """To make and send a response took so long, and so much of a CPU."""
        self._mean_seconds += _NEWEST_WEIGHT * (seconds - self._mean_seconds)
        self._mean_cpu_seconds += _NEWEST_WEIGHT * (cpu_seconds - self._mean_cpu_seconds)

    def take_due(self, now: float) -> list[tuple[int, Result]]:
        """The held deltas whose time has come, by stream id."""
        wait = self._wait_seconds()
        due = [i for i in self._held if now - self._last_sent[i] >= wait]
        for stream_id in due:
            self._last_sent[stream_id] = now
        return [(stream_id, Result.merge(self._held.pop(stream_id))) for stream_id in due]

    def close(self, stream_id: int) -> Result | None:
        """The stream ends: what was still held of it, if anything. Unknown ids are none."""
        self._last_sent.pop(stream_id, None)
        held = self._held.pop(stream_id, None)
        return None if held is None else Result.merge(held)

    def seconds_to_next(self, now: float) -> float | None:
        """How long until a held delta is due; None when nothing is held."""
        if not self._held:
            return None
        first = min(self._last_sent[stream_id] for stream_id in self._held)
        return max(0.0, first + self._wait_seconds() - now)

    def _wait_seconds(self) -> float:
        cost = max(
            self._mean_seconds / SENDING_SHARE, self._mean_cpu_seconds / self._share_of_cores
        )
        return min(len(self._last_sent) * cost, LONGEST_WAIT_SECONDS)
