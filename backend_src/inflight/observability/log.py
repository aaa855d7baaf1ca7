"""Logging set-up: one line an event on stderr, which Triton passes on to its own log.

Modules log through ``logging.getLogger(__name__)``; facts that a machine may want go into
``extra={"facts": {...}}`` and appear as ``key=value`` at the end of the line. Never log a prompt, a
generated text or a request's error text (it quotes the client's values).
"""

from __future__ import annotations

import logging
import sys
import time

ROOT_LOGGER = "inflight"
_MAX_LINE = 8000


class OneLineFormatter(logging.Formatter):
    """``2026-01-02T03:04:05.678Z warning inflight.engine.loop: message key=value``.

    Line breaks (tracebacks, hostile strings) become ``\\n``, so that an event is always one line.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [
            f"{seconds}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.name}:",
            record.getMessage(),
        ]
        parts += [f"{key}={value}" for key, value in getattr(record, "facts", {}).items()]
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        line = " ".join(parts).replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
        return line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + "..."


def configure(level: str) -> None:
    """Sends the events of ``inflight.*`` at ``level`` and above to stderr; may be called again.

    ``level``: "debug", "info", "warning" or "error" (config key ``log_level``).
    """
    root = logging.getLogger(ROOT_LOGGER)
    for handler in list(root.handlers):
        if isinstance(handler.formatter, OneLineFormatter):
            root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
