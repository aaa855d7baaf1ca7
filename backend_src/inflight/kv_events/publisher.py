"""KvEventPublisher: publishes what observers report, on threads and sockets of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from inflight.api.kv_events import KvEventsConfig
from inflight.api.stats import KvEventStats
from inflight.errors import ConfigError
from inflight.kv_cache import BlockObserver, CacheObservers
from inflight.kv_events.announcer import CLEARED, Announcer
from inflight.kv_events.changes import Change, ChangeQueue, TierObserver
from inflight.kv_events.events import (
    DISK_MEDIUM,
    HOST_MEDIUM,
    PRIMARY_MEDIUM,
    KvEvent,
    encode_batch,
)
from inflight.kv_events.replay import Message, ReplayBuffer, ReplayServer, sequence_frame

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.005
"""How long changes gather before they are sent together: one iteration makes many of them."""
MAX_CHANGES = 512
"""In one message; with 32 tokens a block it stays below 100 KB."""
SEND_QUEUE = 1_000
"""Messages that ZeroMQ keeps for a subscriber that does not read; what comes after them is lost to
that subscriber, which sees the gap in the numbers and may ask for a replay."""
_MAX_SUBSCRIPTION_BYTES = 1024
_CLOSE_SECONDS = 2.0
_LINGER_MS = 200


class KvEventPublisher:
    """Messages are three frames: topic, number (8 bytes, big-endian, +1 each, from 0), payload.

    The first message clears all, for consumers that knew the engine before it was started again.
    No observer ever waits for a socket, and no fault of a socket reaches one.
    """

    def __init__(self, config: KvEventsConfig, tokens_per_block: int) -> None:
        self._config = config
        self._queue = ChangeQueue()
        self._announcer = Announcer(tokens_per_block)
        self._buffer = ReplayBuffer(config.buffer_steps)
        self._replay: ReplayServer | None = None
        self._context: Any = None
        self._socket: Any = None
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._num_messages = 0
        self._num_events = 0

    def observer(self, medium: str = PRIMARY_MEDIUM) -> BlockObserver:
        """Reports the blocks of one tier; all calls come from one thread."""
        return TierObserver(self._queue, medium, all_pools=self._config.all_pools)

    def observers(self) -> CacheObservers:
        """Reports the blocks of all levels."""
        media = (PRIMARY_MEDIUM, HOST_MEDIUM, DISK_MEDIUM)
        return CacheObservers(*((self.observer(medium),) for medium in media))

    def start(self) -> None:
        """Binds the endpoints. Raises ConfigError where one cannot be bound."""
        config = self._config
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
            _bind(self._socket, config.endpoint, "kv_events_endpoint")
            self._threads.append(_thread("inflight-kv-events", self._publish))
            if config.replay_endpoint:
                self._add_replay(config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        for thread in self._threads:
            thread.start()
        logger.info("KV events on %s", config.endpoint)

    def close(self) -> None:
        """Says that nothing is cached any more, and ends the threads. Safe to repeat."""
        if self._context is None or self._closing.is_set():
            return
        self._closing.set()
        self._queue.close()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._context.destroy(linger=_LINGER_MS)

    def stats(self) -> KvEventStats:
        replay = self._replay
        return KvEventStats(
            num_messages=self._num_messages,
            num_published_events=self._num_events,
            num_dropped_events=self._queue.num_dropped,
            num_replays=0 if replay is None else replay.num_replays,
            num_refused_replays=0 if replay is None else replay.num_refused,
        )

    def _add_replay(self, endpoint: str) -> None:
        socket = self._context.socket(zmq.ROUTER)
        ReplayServer.configure(socket)
        _bind(socket, endpoint, "kv_events_replay_endpoint")
        self._replay = ReplayServer(socket, self._buffer)
        self._threads.append(_thread("inflight-kv-replay", self._serve_replays))

    def _publish(self) -> None:
        try:
            self._send(CLEARED)
            while self._queue.wait():
                self._closing.wait(GATHER_SECONDS)
                self._send_changes()
            self._send_changes()
            self._tell(self._announcer.changes_to(()))
            self._send(CLEARED)
        except Exception as error:  # events are never worth an answer
            logger.error("KV events are no longer published", exc_info=error)

    def _send_changes(self) -> None:
        changes, all_blocks = self._queue.take()
        if all_blocks is not None:
            logger.warning("KV events were dropped: consumers are told what has changed in all")
            changes = self._announcer.changes_to(all_blocks)
        self._tell(changes)

    def _tell(self, changes: Sequence[Change]) -> None:
        for start in range(0, len(changes), MAX_CHANGES):
            self._send(self._announcer.events(changes[start : start + MAX_CHANGES]))

    def _send(self, events: Sequence[KvEvent]) -> None:
        if not events:
            return
        payload = encode_batch(time.time(), events, self._config.event_format)
        message = Message(self._num_messages, payload)
        self._buffer.append(message)
        topic = self._config.topic.encode("utf-8", "replace")
        self._socket.send_multipart([topic, sequence_frame(message.number), payload])
        self._num_messages += 1
        self._num_events += len(events)

    def _serve_replays(self) -> None:
        assert self._replay is not None
        try:
            while not self._closing.is_set():
                self._replay.turn()
        except Exception as error:
            logger.error("missed KV events can no longer be asked for", exc_info=error)


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def _bind(socket: Any, endpoint: str, key: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: {endpoint!r} cannot be bound: {error.strerror}") from None
