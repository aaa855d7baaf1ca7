"""Events of the KV cache for routers outside: what is stored, what is removed. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inflight.api.kv_events import KvEventsConfig
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.kv_events.publisher import KvEventPublisher

__all__ = ["make_publisher"]


def make_publisher(config: KvEventsConfig, tokens_per_block: int) -> KvEventPublisher:
    """A publisher that is not started. Raises ConfigError where its libraries are missing."""
    try:
        from inflight.kv_events.publisher import KvEventPublisher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"enable_kv_cache_events: needs {error.name}: pip install msgpack pyzmq"
        ) from None
    return KvEventPublisher(config, tokens_per_block)
