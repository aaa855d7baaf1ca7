"""KV events of the real server: they say what it has computed, and outlive its stub."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.fakes.executors import wait_for
from tests.server.harness import Server, free_ports
from tests.server.tiny_checkpoint import make_tiny_checkpoint

PROMPT = "0123456789abcdef" * 4  # one token a byte, so two blocks of 32


def replayed(context: Any, endpoint: str) -> list[dict[str, Any]]:
    """All events of the engine that runs now."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(endpoint)
        socket.send_multipart([b"", bytes(8)])
        events = []
        while True:
            _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return events
            events += msgpack.unpackb(payload)[1]


def last_events(subscriber: Any) -> list[dict[str, Any]]:
    """Until the engine says, as its last word, that nothing is cached."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "AllBlocksCleared":
        events += msgpack.unpackb(subscriber.recv_multipart()[2])[1]
    return events


def test_a_router_follows_the_server_through_the_death_of_its_stub(tmp_path: Path) -> None:
    endpoint, replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    server = Server(
        tmp_path / "server.log",
        *("--model", str(make_tiny_checkpoint(tmp_path / "tiny"))),
        *("--enable-kv-cache-events", "true", "--kv-events-endpoint", endpoint),
        *("--kv-events-replay-endpoint", replay_endpoint),
    )
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        try:
            server.wait_ready()
            cleared, stored = _answered_and_replayed(server, context, replay_endpoint)
            assert cleared == {"type": "AllBlocksCleared"}
            first, second = stored["token_ids"][:32], stored["token_ids"][32:]
            assert first == second and len(set(first)) == 16, "the tokens of the prompt"
            server.client.wait_for_metric("inflight_kv_events_total", '"published"', 2)

            os.kill(server.stub_of("inflight_llm"), signal.SIGKILL)
            wait_for(lambda: server.log.read_text().count("inflight: ready after") == 2, 60)
            again = _answered_and_replayed(server, context, replay_endpoint)
            assert again == [cleared, stored], "from the beginning, and names are for ever"

            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
            subscriber.connect(endpoint)
            letters = iter("ghijklmnopqrstuvwxyz")
            wait_for(lambda: _hears(server, subscriber, next(letters)), 20)
            server.stop()
            removed = [e for e in last_events(subscriber) if e["type"] == "BlockRemoved"]
            hashes = {name for event in removed for name in event["block_hashes"]}
            assert hashes.issuperset(stored["block_hashes"])
        finally:
            server.stop()


def _answered_and_replayed(server: Server, context: Any, endpoint: str) -> list[dict[str, Any]]:
    server.client.generate("inflight_llm", text_input=PROMPT, max_tokens=2, end_id=-1)
    wait_for(lambda: len(replayed(context, endpoint)) == 2, 10)
    return replayed(context, endpoint)


def _hears(server: Server, subscriber: Any, letter: str) -> bool:
    """A subscription takes a moment to reach the server, so something new is said each time."""
    server.client.generate("inflight_llm", text_input=letter * 40, max_tokens=2, end_id=-1)
    return bool(subscriber.poll(300))
