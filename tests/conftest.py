"""What every test process needs before torch is imported anywhere, and hypothesis's profiles."""

from __future__ import annotations

import os

from hypothesis import settings

from inflight.api.config import set_thread_defaults

set_thread_defaults()
# Triton decides when a kernel is defined whether it will be compiled or interpreted; a card is met
# by tests/gpu alone.
os.environ["TRITON_INTERPRET"] = "1"

# The gate of a change draws the same examples each time, so that it judges the change alone; every
# other run draws new ones, and what such a run finds becomes an @example.
settings.register_profile("ci", derandomize=True)
