"""What an engine that publishes the events of its KV cache needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.errors import ConfigError

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
DEFAULT_BUFFER_STEPS = 10_000

_TRANSPORTS = ("tcp://", "ipc://")


class KvEventFormat(Enum):
    """How an event is written in its msgpack message; the batch around it is the same."""

    MAP = "map"
    """A map with the key ``type``: Dynamo and vllm-router."""
    ARRAY = "array"
    """An array that begins with the type: llm-d and older consumers of vLLM's events; Dynamo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Endpoints are ZeroMQ's, such as ``tcp://127.0.0.1:5557``; the engine binds them."""

    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str = ""
    """Where missed messages can be asked for again; "" = nowhere."""
    topic: str = ""
    """The first frame of each message; at most 255 bytes of UTF-8."""
    event_format: KvEventFormat = KvEventFormat.MAP
    buffer_steps: int = DEFAULT_BUFFER_STEPS
    """Messages kept for the replay endpoint, at most."""
    all_pools: bool = False
    """Tell of the blocks of each KV pool, and which it is; otherwise of the first pool's."""

    def __post_init__(self) -> None:
        for key in ("endpoint", "replay_endpoint"):
            value = getattr(self, key)
            if (value or key == "endpoint") and not value.startswith(_TRANSPORTS):
                raise ConfigError(
                    f"kv_events_{key}: {value!r} must begin with {' or '.join(_TRANSPORTS)}"
                )
        if self.replay_endpoint == self.endpoint:
            raise ConfigError("kv_events_replay_endpoint: must not be kv_events_endpoint")
        if len(self.topic.encode("utf-8", "replace")) > 255:
            raise ConfigError("kv_events_topic: must be at most 255 bytes long")
        if self.buffer_steps < 1:
            raise ConfigError(f"kv_events_buffer_steps: {self.buffer_steps} must be 1 or larger")
