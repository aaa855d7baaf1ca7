"""Messages that were sent, for a while, and the socket where they can be asked for again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import zmq

MAX_BUFFERED_BYTES = 64 << 20
MAX_ANSWERS = 16
"""Clients that are answered at once; requests of others wait in the socket, which is bounded."""
MAX_REQUEST_BYTES = 256
"""Of one frame; who sends a longer one is disconnected."""
ANSWER_PATIENCE_SECONDS = 5.0
"""A client that takes nothing of its answer for this long gets no more of it."""

_TURN = 64
"""Messages for one client before the next has its turn."""
_BLOCKED_POLL_MS = 5
_IDLE_POLL_MS = 200
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def sequence_frame(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Message(NamedTuple):
    number: int
    """Counted from 0 for each start of an engine."""
    payload: bytes


class ReplayBuffer:
    """The newest messages, bounded in number and in bytes. Thread-safe."""

    def __init__(self, max_messages: int, max_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def append(self, message: Message) -> None:
        with self._lock:
            self._messages.append(message)
            self._num_bytes += len(message.payload)
            while len(self._messages) > self._max_messages or (
                self._num_bytes > self._max_bytes and len(self._messages) > 1
            ):
                self._num_bytes -= len(self._messages.popleft().payload)

    def since(self, number: int, limit: int) -> list[Message]:
        """At most ``limit`` kept messages from ``number`` on, or from the oldest one on."""
        with self._lock:
            if not self._messages:
                return []
            skipped = max(0, number - self._messages[0].number)
            if skipped >= len(self._messages):
                return []
            return list(islice(self._messages, skipped, skipped + limit))


class _Answer:
    def __init__(self, start: int, now: float) -> None:
        self.next_number = start
        self.moved_at = now


class ReplayServer:
    """Answers ``[empty, first number]`` with ``[empty, number, payload]`` for each kept message
    from there on, then ``[empty, -1, empty]``; numbers are 8 bytes, big-endian.

    One thread calls ``turn``. Sending never waits: a client that does not read is passed over, and
    given up after a while; a malformed request is counted and not answered.
    """

    def __init__(
        self, socket: Any, buffer: ReplayBuffer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``socket``: what ``configure`` was called with, bound."""
        self._socket = socket
        self._buffer = buffer
        self._clock = clock
        self._answers: dict[bytes, _Answer] = {}
        self.num_replays = 0
        """Answers that were begun."""
        self.num_refused = 0

    @staticmethod
    def configure(socket: Any) -> None:
        """Sets the bounds of a ROUTER socket, before it is bound."""
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.RCVHWM, MAX_ANSWERS)
        socket.setsockopt(zmq.SNDHWM, 2 * _TURN)
        # With it, sending says that a client is full or gone instead of losing the message.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def turn(self) -> None:
        """Waits a moment for requests, takes them, and sends to each client what it can take."""
        has_room = len(self._answers) < MAX_ANSWERS
        if has_room and self._socket.poll(_BLOCKED_POLL_MS if self._answers else _IDLE_POLL_MS):
            self._take_requests()
        elif not has_room:
            time.sleep(_BLOCKED_POLL_MS / 1000)
        for client, answer in list(self._answers.items()):
            if self._is_over(client, answer):
                del self._answers[client]

    def _take_requests(self) -> None:
        """A few; then the answers go on, however many more have come."""
        for _ in range(MAX_ANSWERS - len(self._answers)):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                start = int.from_bytes(frames[2], "big")
                self._answers[frames[0]] = _Answer(start, self._clock())
                self.num_replays += 1
            else:
                self.num_refused += 1

    def _is_over(self, client: bytes, answer: _Answer) -> bool:
        try:
            messages = self._buffer.since(answer.next_number, _TURN)
            for message in messages:
                self._send(client, sequence_frame(message.number), message.payload)
                answer.next_number = message.number + 1
                answer.moved_at = self._clock()
            if len(messages) < _TURN:
                self._send(client, _END_OF_REPLAY, b"")
                return True
        except zmq.Again:
            return self._clock() - answer.moved_at > ANSWER_PATIENCE_SECONDS
        except zmq.ZMQError:  # the client has gone
            return True
        return False

    def _send(self, client: bytes, number: bytes, payload: bytes) -> None:
        self._socket.send_multipart([client, b"", number, payload], zmq.NOBLOCK)
