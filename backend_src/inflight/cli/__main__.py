"""``python -m inflight.cli``: the command, by the interpreter that runs this."""

from __future__ import annotations

from inflight.cli.main import main

main()
