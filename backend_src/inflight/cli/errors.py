"""The one exception of the command line."""

from __future__ import annotations

from inflight.errors import InflightError


class StartupError(InflightError):
    """The server cannot be started, or did not become ready. The text is one line for a person."""
