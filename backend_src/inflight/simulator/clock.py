"""SimulatedClock: the time of a simulation."""

from __future__ import annotations


class SimulatedClock:
    """A clock to call, as the engine's; whoever takes time moves ``now``."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation began."""

    def __call__(self) -> float:
        return self.now
