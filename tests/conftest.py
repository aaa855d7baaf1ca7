"""What every test process needs before torch is imported anywhere."""

from __future__ import annotations

from inflight.api.config import set_thread_defaults

set_thread_defaults()
