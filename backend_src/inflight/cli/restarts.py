"""When to start the server again, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A server that lived ``stable_seconds`` has earned a fresh start; else the wait doubles."""

    enabled: bool = True
    most_quick_failures: int = 5
    stable_seconds: float = 60.0
    first_delay_seconds: float = 0.5
    longest_delay_seconds: float = 30.0


class RestartBudget:
    """Counts the failures in a row of one supervisor."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._quick_failures = 0

    def delay_after_failure(self, ready_seconds: float) -> float | None:
        """Seconds to wait before the next start; None: give up.

        ``ready_seconds``: how long the failed server had been ready, 0 if it never was.
        """
        policy = self._policy
        if not policy.enabled:
            return None
        if ready_seconds >= policy.stable_seconds:
            self._quick_failures = 0
        self._quick_failures += 1
        if self._quick_failures > policy.most_quick_failures:
            return None
        doubled = policy.first_delay_seconds * 2 ** (self._quick_failures - 1)
        return min(float(doubled), policy.longest_delay_seconds)
