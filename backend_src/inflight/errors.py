"""Every exception of Inflight, by the radius of what it ends.

::

    InflightError
    ├── ConfigError             start: a configuration key is wrong; names the key
    │   └── CheckpointError     start: the model folder cannot be served; says why
    ├── RequestError            radius one request; its text is safe to send to a client
    │   ├── InvalidRequestError     a field has a bad value: names field, value and limit
    │   ├── UnsupportedRequestError a known name that this engine does not honour: says why
    │   ├── DuplicateRequestError   the request id is already in flight
    │   ├── QueueFullError          max_queue_size requests are already waiting
    │   ├── ShuttingDownError       the executor no longer takes requests
    │   └── RequestFailedError      the server failed this request (a batch or engine error)
    ├── BatchError              radius one batch: its requests get an error, the engine goes on
    │   ├── ForwardError            the model's forward pass or the sampler raised
    │   └── OutOfBlocksError        a plan asked for more KV blocks than exist (nothing was taken)
    └── EngineError             radius the engine: everybody gets an error, the executor stops
        │                           (itself: a device that does nothing any more)
        └── IntegrityError          the KV cache's books do not add up: a bug of ours

This module imports nothing.
"""

from __future__ import annotations


class InflightError(Exception):
    """Base of every exception that Inflight raises on purpose."""


class ConfigError(InflightError):
    """A configuration key has a wrong name or value. The text names the key."""


class CheckpointError(ConfigError):
    """The checkpoint cannot be served (not found, not understood, refused by architecture)."""


class RequestError(InflightError):
    """One request cannot be served. The text goes to the client: no paths, no tracebacks."""


class InvalidRequestError(RequestError):
    """A field of the request has a value outside its range.

    Build it from the three things a client needs: ``field``, ``value`` and ``limit`` (a phrase such
    as "must be between 0 and 1").
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: {shown} {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class UnsupportedRequestError(RequestError):
    """A known tensor or parameter asks for something that this engine does not do."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class DuplicateRequestError(RequestError):
    """A request with the same id is still in flight."""


class QueueFullError(RequestError):
    """The queue already holds ``max_queue_size`` requests."""


class ShuttingDownError(RequestError):
    """The executor is shutting down, or has stopped, and takes no more requests."""


class RequestFailedError(RequestError):
    """The server failed while it worked on this request; what a client sees of the wider radii."""


class BatchError(InflightError):
    """One iteration failed; the requests of its batch get an error, all others go on."""


class ForwardError(BatchError):
    """The forward pass or the sampler raised. The cause is chained and logged, never sent."""


class OutOfBlocksError(BatchError):
    """``reserve`` found too few free blocks; it took none."""


class EngineError(InflightError):
    """The engine cannot go on; every request in it gets an error and the executor stops."""


class IntegrityError(EngineError):
    """An invariant of the KV cache or of the request states does not hold."""


_LONGEST_REASON = 300


def one_line(error: Exception) -> str:
    """What a library says of a fault, which may be pages, as the end of an error of ours."""
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
