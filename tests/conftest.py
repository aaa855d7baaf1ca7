"""What every test process needs before torch is imported anywhere, and hypothesis's profiles."""

from __future__ import annotations

from hypothesis import settings

from inflight.api.config import set_thread_defaults

set_thread_defaults()

# The gate of a change draws the same examples each time, so that it judges the change alone; every
# other run draws new ones, and what such a run finds becomes an @example.
settings.register_profile("ci", derandomize=True)
