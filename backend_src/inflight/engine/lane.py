"""ForwardLane: where the heavy part of an iteration runs, seen from the loop that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inflight.model.runner import nothing_beside
from inflight.sampling.sampler import SampledTokens

ForwardWork = Callable[[Callable[[], None]], SampledTokens]
"""The forward pass and the sampling of one iteration, ready to run on any thread. Its argument is
``launched`` of ``ModelRunner.forward``."""


class ForwardLane(Protocol):
    """Carries one piece of work at a time: ``start``, then ``wait``, by the same thread."""

    def start(self, work: ForwardWork) -> None:
        """Returns when the work is launched; what the caller does now, it does beside it."""
        ...

    def wait(self) -> SampledTokens:
        """The result of what was started last, when it is there. Raises what the work raised."""
        ...


class InlineLane:
    """No other thread: the work runs when it is waited for. The loop is the same, step by step."""

    def __init__(self) -> None:
        self._work: ForwardWork | None = None

    def start(self, work: ForwardWork) -> None:
        assert self._work is None
        self._work = work

    def wait(self) -> SampledTokens:
        work, self._work = self._work, None
        assert work is not None
        return work(nothing_beside)
