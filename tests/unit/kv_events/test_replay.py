"""The replay server against a socket that does what the worst clients make it do."""

from __future__ import annotations

import zmq

from inflight.kv_events.replay import (
    ANSWER_PATIENCE_SECONDS,
    MAX_ANSWERS,
    Message,
    ReplayBuffer,
    ReplayServer,
)

END = (-1).to_bytes(8, "big", signed=True)


class FakeRouter:
    """Requests to come, answers by client; ``room``: how many messages each client still takes."""

    def __init__(self) -> None:
        self.requests: list[list[bytes]] = []
        self.sent: dict[bytes, list[bytes]] = {}
        self.room: dict[bytes, int] = {}
        self.gone: set[bytes] = set()

    def ask(self, *clients: bytes, start: int = 0) -> None:
        self.requests += [[client, b"", start.to_bytes(8, "big")] for client in clients]

    def poll(self, timeout: int) -> int:
        return len(self.requests)

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.requests:
            raise zmq.Again
        return self.requests.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK, "sending must not wait"
        client, empty, number, _ = frames
        if client in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        left = self.room.get(client, 10_000)
        if left == 0:
            raise zmq.Again
        self.room[client] = left - 1
        self.sent.setdefault(client, []).append(number)


class World:
    def __init__(self, num_messages: int = 200) -> None:
        self.now = 0.0
        self.router = FakeRouter()
        buffer = ReplayBuffer(1000)
        for number in range(num_messages):
            buffer.append(Message(number, b"payload"))
        self.server = ReplayServer(self.router, buffer, lambda: self.now)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.server.turn()

    def numbers(self, client: bytes) -> list[int]:
        sent = self.router.sent.get(client, [])
        return [int.from_bytes(number, "big", signed=True) for number in sent]


def test_clients_are_answered_in_turns() -> None:
    world = World()
    world.router.ask(b"a", b"b")
    world.turn()
    assert len(world.numbers(b"a")) == len(world.numbers(b"b")) == 64
    world.turn(3)
    assert world.numbers(b"a") == world.numbers(b"b") == [*range(200), -1]


def test_a_client_that_is_full_goes_on_where_it_was() -> None:
    world = World()
    world.router.room[b"a"] = 70
    world.router.ask(b"a")
    world.turn(5)
    assert world.numbers(b"a") == list(range(70))
    world.router.room[b"a"] = 1000
    world.turn(5)
    assert world.numbers(b"a") == [*range(200), -1]


def test_a_client_that_takes_nothing_is_given_up_and_may_ask_again() -> None:
    world = World()
    world.router.room[b"a"] = 10
    world.router.ask(b"a")
    world.turn(2)
    world.now += ANSWER_PATIENCE_SECONDS + 0.1
    world.turn(2)
    world.router.room[b"a"] = 1000
    world.turn(2)
    assert world.numbers(b"a") == list(range(10))
    world.router.ask(b"a", start=199)
    world.turn()
    assert world.numbers(b"a")[10:] == [199, -1]


def test_a_client_that_has_gone_is_forgotten() -> None:
    world = World()
    world.router.gone.add(b"a")
    world.router.ask(b"a", b"b", start=190)
    world.turn(2)
    assert world.numbers(b"a") == [] and world.numbers(b"b") == [*range(190, 200), -1]


def test_so_many_are_answered_at_once_and_the_others_wait() -> None:
    world = World()
    clients = [bytes([number]) for number in range(MAX_ANSWERS + 3)]
    for client in clients[:MAX_ANSWERS]:
        world.router.room[client] = 0
    world.router.ask(*clients)
    world.turn(3)
    assert len(world.router.requests) == 3 and world.server.num_replays == MAX_ANSWERS
    world.now += ANSWER_PATIENCE_SECONDS + 0.1
    world.turn(6)
    assert all(world.numbers(client)[-1] == -1 for client in clients[MAX_ANSWERS:])


def test_who_asks_again_and_again_has_one_answer() -> None:
    world = World()
    world.router.room[b"a"] = 0
    world.router.ask(*[b"a"] * 100)
    world.turn(10)
    assert world.router.requests == [], "taken, each in the place of the one before"
    world.router.room[b"a"] = 1000
    world.turn(6)
    assert world.numbers(b"a") == [*range(200), -1]


def test_the_buffer_is_bounded_in_bytes_and_keeps_the_newest() -> None:
    buffer = ReplayBuffer(100, max_bytes=25)
    for number in range(6):
        buffer.append(Message(number, b"x" * 10))
    assert [message.number for message in buffer.since(0, 100)] == [4, 5]
    buffer.append(Message(6, b"x" * 1000))
    assert [message.number for message in buffer.since(0, 100)] == [6], "and always the last one"
    assert ReplayBuffer(1).since(0, 5) == []


def test_the_end_mark_is_minus_one() -> None:
    world = World(num_messages=0)
    world.router.ask(b"a")
    world.turn()
    assert world.router.sent[b"a"] == [END]
