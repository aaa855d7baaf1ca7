"""The publisher over real sockets: what subscribers and replay clients see, friendly or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from inflight.api import KvCacheConfig
from inflight.api.config import InflightConfig
from inflight.api.kv_events import KvEventFormat, KvEventsConfig
from inflight.errors import ConfigError
from inflight.kv_cache import KvCacheManager
from inflight.kv_events import make_publisher
from inflight.kv_events.publisher import KvEventPublisher
from tests.fakes.executors import wait_for
from tests.unit.kv_cache.helpers import T, run, take_all, tokens

PATIENCE_MS = 5000


class World:
    """A KV cache, its publisher, and clients of the publisher."""

    def __init__(self, folder: Path, num_blocks: int = 8, **options: Any) -> None:
        self.config = KvEventsConfig(
            endpoint=f"ipc://{folder}/e", replay_endpoint=f"ipc://{folder}/r", **options
        )
        self.publisher: KvEventPublisher = make_publisher(self.config, T)
        self.kv = KvCacheManager(
            num_blocks,
            KvCacheConfig(tokens_per_block=T),
            observers=[self.publisher.observer()],
        )
        self.publisher.start()
        self.context = zmq.Context()
        self._clients: list[Any] = []
        self._next_request = 0

    def client(self, kind: int, endpoint: str) -> Any:
        socket = self.context.socket(kind)
        self._clients.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def subscriber(self) -> Any:
        """Connected for certain: it has heard of blocks that were made until it did."""
        socket = self.client(zmq.SUB, self.config.endpoint)
        for number in range(1000):
            self.use(700 + number, 0)
            if socket.poll(20):
                return socket
        raise AssertionError("the subscriber hears nothing")

    def use(self, *blocks: int) -> None:
        """A request comes and goes; its blocks stay cached."""
        self._next_request += 1
        run(self.kv, self._next_request, tokens(*blocks))
        self.kv.close(self._next_request)

    def settle(self, num_events: int) -> None:
        wait_for(lambda: self.publisher.stats().num_published_events >= num_events)

    def replay(self, start: bytes) -> list[tuple[int, list[Any]]]:
        socket = self.client(zmq.DEALER, self.config.replay_endpoint)
        socket.send_multipart([b"", start])
        return read_answer(socket)

    def end(self) -> None:
        self.publisher.close()
        for socket in self._clients:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        worlds.append(World(folder, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.end()


def number(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)


def read_answer(socket: Any) -> list[tuple[int, list[Any]]]:
    """(number, events) of each message, until the end mark."""
    messages = []
    while True:
        empty, sequence, payload = socket.recv_multipart()
        assert empty == b"" and len(sequence) == 8
        if number(sequence) == -1:
            assert payload == b""
            return messages
        messages.append((number(sequence), msgpack.unpackb(payload)[1]))


def start_at(first: int) -> bytes:
    return first.to_bytes(8, "big")


def test_messages_are_topic_number_and_payload_and_numbers_have_no_gaps(
    make_world: Callable[..., World],
) -> None:
    world = make_world(topic="kv@pod@model", num_blocks=64)
    socket = world.subscriber()
    world.use(10, 20)
    numbers, hashes = [], []
    while True:
        topic, sequence, payload = socket.recv_multipart()
        assert topic == b"kv@pod@model"
        numbers.append(number(sequence))
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        hashes += [e["token_ids"] for e in events if e["type"] == "BlockStored"]
        if tokens(10, 20).tolist() in hashes:
            break
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_replay_begins_with_the_clearing_and_tells_all_that_happened(
    make_world: Callable[..., World],
) -> None:
    world = make_world(num_blocks=2)
    world.use(10, 20)
    world.settle(2)
    take_all(world.kv, 999)
    world.settle(3)
    messages = world.replay(start_at(0))
    assert [n for n, _ in messages] == list(range(len(messages)))
    events = [event for _, found in messages for event in found]
    assert [event["type"] for event in events] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockRemoved",
    ]
    _, stored, removed = events
    assert stored["token_ids"] == tokens(10, 20).tolist() and stored["block_size"] == T
    assert removed["block_hashes"] == stored["block_hashes"][::-1]
    assert stored["medium"] == removed["medium"] == "GPU"


def test_a_replay_starts_where_it_is_asked_to_and_the_buffer_forgets(
    make_world: Callable[..., World],
) -> None:
    world = make_world(buffer_steps=3)
    for index in range(5):
        world.use(100 + index)
        world.settle(index + 2)
    assert [n for n, _ in world.replay(start_at(0))] == [3, 4, 5]
    assert [n for n, _ in world.replay(start_at(4))] == [4, 5]
    assert world.replay(start_at(6)) == []
    assert world.replay(b"\xff" * 8) == []


def test_a_long_replay_arrives_whole(make_world: Callable[..., World]) -> None:
    world = make_world(num_blocks=400)
    for index in range(300):
        world.use(10 * index)
        world.settle(index + 2)
    assert [n for n, _ in world.replay(start_at(1))] == list(range(1, 301))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"x", b"\0" * 8],
        [b"", b"\0" * 7],
        [b"", b"\0" * 9],
        [b"", b"\0" * 8, b"more"],
        [b""] * 500,
    ],
)
def test_a_malformed_request_is_counted_and_harms_nobody(
    make_world: Callable[..., World], frames: list[bytes]
) -> None:
    world = make_world()
    hostile = world.client(zmq.DEALER, world.config.replay_endpoint)
    hostile.send_multipart(frames)
    wait_for(lambda: world.publisher.stats().num_refused_replays == 1)
    assert len(world.replay(start_at(0))) == 1
    assert hostile.poll(0) == 0


def test_who_sends_a_frame_that_is_too_long_is_cut_off(make_world: Callable[..., World]) -> None:
    world = make_world()
    hostile = world.client(zmq.DEALER, world.config.replay_endpoint)
    hostile.send_multipart([b"", b"x" * 100_000])
    assert len(world.replay(start_at(0))) == 1
    assert world.publisher.stats().num_refused_replays == 0, "it did not get that far"


def test_clients_that_do_not_read_hold_up_nobody(make_world: Callable[..., World]) -> None:
    world = make_world(num_blocks=2000)
    world.use(*range(0, 10_000, 10))
    world.settle(3)
    deaf = [world.client(zmq.SUB, world.config.endpoint)]
    for _ in range(5):
        deaf.append(world.client(zmq.DEALER, world.config.replay_endpoint))
        deaf[-1].setsockopt(zmq.RCVHWM, 1)
        for _ in range(50):
            deaf[-1].send_multipart([b"", start_at(0)])
    messages = world.replay(start_at(0))
    assert sum(len(e.get("block_hashes", ())) for _, found in messages for e in found) == 1000
    world.use(77)
    world.settle(4)


def test_closing_says_that_nothing_is_cached(make_world: Callable[..., World]) -> None:
    world = make_world(num_blocks=64)
    socket = world.subscriber()
    world.use(10, 20)
    world.publisher.close()
    known: set[int] = set()
    last = ""
    while last != "AllBlocksCleared":
        for event in msgpack.unpackb(socket.recv_multipart()[2])[1]:
            last = event["type"]
            hashes = event.get("block_hashes", ())
            known = known | set(hashes) if last == "BlockStored" else known - set(hashes)
    # Blocks that were stored before the subscriber had joined are removed as well, unknown to it.
    assert known == set()
    world.use(30)  # a cache that goes on finds nobody, and no fault


def test_an_endpoint_in_use_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    taken.bind("tcp://127.0.0.1:*")
    endpoint = taken.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        with pytest.raises(ConfigError, match=r"kv_events_endpoint.*in use"):
            make_publisher(KvEventsConfig(endpoint=endpoint), T).start()
        with pytest.raises(ConfigError, match="kv_events_replay_endpoint.*in use"):
            make_publisher(
                KvEventsConfig(endpoint=f"ipc://{tmp_path}/e", replay_endpoint=endpoint), T
            ).start()
    finally:
        taken.close(linger=0)
        context.term()


@pytest.mark.parametrize("library", ["zmq", "msgpack"])
def test_a_missing_library_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    for name in list(sys.modules):
        if name.startswith("inflight.kv_events."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"needs {library}: pip install msgpack pyzmq"):
        make_publisher(KvEventsConfig(), T)


def test_events_of_a_cache_that_reuses_nothing_are_refused() -> None:
    config = InflightConfig(enable_kv_cache_events=True, enable_kv_cache_reuse=False)
    with pytest.raises(ConfigError, match="enable_kv_cache_events: needs enable_kv_cache_reuse"):
        config.executor_config(max_seq_len=100)


def test_the_keys_become_the_executors_fields_and_nothing_is_published_by_default() -> None:
    assert InflightConfig().executor_config(max_seq_len=100).kv_events_config is None
    config = InflightConfig.load(
        environment={
            "INFLIGHT_ENABLE_KV_CACHE_EVENTS": "true",
            "INFLIGHT_KV_EVENTS_REPLAY_ENDPOINT": "tcp://127.0.0.1:5558",
            "INFLIGHT_KV_EVENTS_TOPIC": "kv@pod@model",
            "INFLIGHT_KV_EVENTS_FORMAT": "array",
            "INFLIGHT_KV_EVENTS_BUFFER_STEPS": "7",
        }
    )
    assert config.executor_config(max_seq_len=100).kv_events_config == KvEventsConfig(
        endpoint="tcp://127.0.0.1:5557",
        replay_endpoint="tcp://127.0.0.1:5558",
        topic="kv@pod@model",
        event_format=KvEventFormat.ARRAY,
        buffer_steps=7,
    )


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"endpoint": ""}, "kv_events_endpoint"),
        ({"endpoint": "127.0.0.1:5557"}, "kv_events_endpoint"),
        ({"replay_endpoint": "inproc://x"}, "kv_events_replay_endpoint"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "kv_events_replay_endpoint"),
        ({"topic": "x" * 256}, "kv_events_topic"),
        ({"buffer_steps": 0}, "kv_events_buffer_steps"),
    ],
)
def test_wrong_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        KvEventsConfig(**options)
