"""The one exception of the command line."""

from __future__ import annotations

from inflight.errors import InflightError


class StartupError(InflightError):
    """The server cannot be started, or did not become ready. The text is one line for a person."""

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        """``remedy``: what to do about it, a command where there is one."""
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy
