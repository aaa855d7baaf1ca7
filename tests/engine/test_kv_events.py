"""Events of a running engine: a subscriber knows what the next request will reuse."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from inflight.api import KvTiersConfig, Request
from inflight.api.kv_events import KvEventFormat, KvEventsConfig
from inflight.errors import ConfigError
from inflight.executor import Executor
from tests.fakes.arithmetic_runner import ArithmeticRunner
from tests.fakes.executors import make_executor, wait_for

PROMPT = list(range(1, 23))


def answer(executor: Executor, prompt: list[int]) -> None:
    request_id = executor.enqueue_request(Request(input_token_ids=prompt, max_tokens=3))
    while not any(r.is_final for r in executor.await_responses(request_id, 10.0)):
        pass


def replayed(endpoint: str) -> list[Any]:
    """All events so far, in order."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", bytes(8)])
        events = []
        while True:
            _, number, payload = dealer.recv_multipart()
            if number == b"\xff" * 8:
                return events
            events += msgpack.unpackb(payload)[1]


@pytest.mark.parametrize("event_format", KvEventFormat)
def test_every_full_block_of_an_answer_is_told(tmp_path: Path, event_format: KvEventFormat) -> None:
    config = KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/e",
        replay_endpoint=f"ipc://{tmp_path}/r",
        event_format=event_format,
    )
    with make_executor(kv_events_config=config) as executor:
        answer(executor, PROMPT)
        wait_for(lambda: _num_blocks(replayed(config.replay_endpoint)) == 6)
        answer(executor, PROMPT)
        stats = executor.kv_event_stats()
    assert stats is not None and stats.num_dropped_events == 0
    assert executor.kv_cache_stats().reused_blocks >= 5, "what was announced was found"


def _num_blocks(events: list[Any]) -> int:
    """Of the prompt's first 24 tokens (22, and 2 generated ones); the whole chain in order."""
    told: list[int] = []
    for event in events:
        fields = list(event.values()) if isinstance(event, dict) else event
        if fields[0] == "BlockStored":
            told += fields[3]
    assert told[: len(PROMPT)] == PROMPT[: len(told)]
    return len(told) // 4


def test_a_block_is_told_in_each_tier_on_its_way_down(tmp_path: Path) -> None:
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r")
    block_bytes = 4 * ArithmeticRunner().spec.kv_bytes_per_token
    tiers = KvTiersConfig(
        host_memory_bytes=4 * block_bytes, disk_bytes=1 << 20, disk_path=str(tmp_path)
    )
    others = ([first] * len(PROMPT) for first in range(100, 1000))
    moves: list[tuple[str, str]] = []

    def has_gone_all_the_way() -> bool:
        answer(executor, next(others))
        moves[:] = _moves_of_first_block(replayed(config.replay_endpoint))
        return len(moves) >= 5

    with make_executor(
        kv_events_config=config, tiers=tiers, num_blocks=8, max_seq_len=32
    ) as executor:
        answer(executor, PROMPT)
        wait_for(has_gone_all_the_way)
    assert moves == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "GPU"),
        ("BlockStored", "DISK"),
        ("BlockRemoved", "CPU"),
    ]


def _moves_of_first_block(events: list[Any]) -> list[tuple[str, str]]:
    """What was told so far of the first block of PROMPT, and of which medium."""
    stored = (event for event in events if event["type"] == "BlockStored")
    names = [e["block_hashes"][0] for e in stored if e["token_ids"][:4] == PROMPT[:4]]
    return [
        (event["type"], event["medium"])
        for event in events
        if names and names[0] in event.get("block_hashes", ())
    ]


def test_an_endpoint_that_is_taken_leaves_the_disk_to_the_next_one(tmp_path: Path) -> None:
    tiers = KvTiersConfig(disk_bytes=1 << 20, disk_path=str(tmp_path))
    before = set(threading.enumerate())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = KvEventsConfig(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="kv_events_endpoint"):
            make_executor(kv_events_config=config, tiers=tiers)
    assert set(threading.enumerate()) == before
    with make_executor(tiers=tiers) as executor:
        answer(executor, PROMPT)


def test_without_a_word_nothing_is_published() -> None:
    with make_executor() as executor:
        assert executor.kv_event_stats() is None


def test_a_fault_of_the_publisher_is_not_one_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise OSError("no more of it")

    monkeypatch.setattr("inflight.kv_events.publisher.encode_batch", broken)
    with make_executor(kv_events_config=KvEventsConfig(endpoint=f"ipc://{tmp_path}/e")) as executor:
        wait_for(lambda: "no longer published" in caplog.text)
        answer(executor, PROMPT)
        assert executor.is_healthy
