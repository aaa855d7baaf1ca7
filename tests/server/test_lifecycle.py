"""How requests end early (cancel, disconnect, stop, deadline), and that their blocks come back."""

from __future__ import annotations

import threading
import time

import pytest

from tests.server.harness import Client, GrpcStream

LONG = {"text_input": "Once upon a time", "max_tokens": 1500, "min_tokens": 1500, "stream": True}
ACTIVE = ("nv_trt_llm_request_metrics", '"active"')
USED = ("nv_trt_llm_kv_cache_block_metrics", '"used"')


def assert_idle(client: Client) -> None:
    client.wait_for_metric(*ACTIVE, 0)
    client.wait_for_metric(*USED, 0)


def test_http_disconnect_on_the_direct_door(client: Client) -> None:
    connection = client.open_stream("inflight_llm", **LONG)
    client.wait_for_metric(*ACTIVE, 1)
    connection.close()
    assert_idle(client)


def test_grpc_cancel_on_the_direct_door(client: Client) -> None:
    stream = GrpcStream(client)
    stream.ask("inflight_llm", **LONG)
    assert stream.next().text
    client.wait_for_metric(*ACTIVE, 1)
    stream.close(cancel=True)
    assert_idle(client)


def test_stop_request_ends_the_one_with_its_id(client: Client, door: str) -> None:
    with GrpcStream(client) as stream, GrpcStream(client) as stopper:
        stream.ask(door, "to-stop", **LONG)
        assert stream.next().text
        stopper.ask(door, "to-stop", stop=True)
        answer = stopper.events(timeout=20)
        rest = stream.events(timeout=20)
    assert rest[-1].outputs["finish_reason"] == "cancelled"
    assert rest[-1].error is None
    assert [e.is_final for e in answer].count(True) == 1 and answer[-1].error is None
    assert_idle(client)


def test_stop_without_an_id_is_refused_and_an_unknown_id_is_not(client: Client, door: str) -> None:
    with GrpcStream(client) as stream:
        stream.ask(door, stop=True)
        event = stream.events()[-1]
        assert event.error is not None and "request id" in event.error
        stream.ask(door, "nobody", stop=True)
        assert stream.events()[-1].error is None


def test_an_id_in_flight_is_refused(client: Client, door: str) -> None:
    with GrpcStream(client) as first, GrpcStream(client) as second:
        first.ask(door, "twice", **LONG)
        assert first.next().text
        second.ask(door, "twice", **LONG)
        event = second.events()[-1]
        assert event.error is not None and "twice" in event.error
        second.ask(door, "twice", stop=True)
        assert first.events()[-1].outputs["finish_reason"] == "cancelled"
    assert_idle(client)


@pytest.mark.parametrize("how", ["tensor", "parameter", "grpc"])
def test_deadlines(client: Client, door: str, how: str) -> None:
    if how == "grpc":
        with GrpcStream(client) as stream:
            stream.ask(door, timeout=700_000, **LONG)
            events = stream.events()
        reason, text = events[-1].outputs["finish_reason"], "".join(e.text for e in events)
    else:
        fields = {"timeout_us": 700_000} if how == "tensor" else {"timeout": 700_000}
        body = client.generate(door, **(LONG | {"stream": False}), **fields)
        reason, text = body["finish_reason"], body["text_output"]
    assert reason == "timed_out"
    assert text, "what was generated is sent"
    assert_idle(client)


def test_a_short_request_overtakes_long_ones(client: Client, door: str) -> None:
    ends: dict[str, float] = {}

    def ask(name: str, tokens: int) -> None:
        client.generate(door, text_input="Once upon a time", max_tokens=tokens, min_tokens=tokens)
        ends[name] = time.perf_counter() - began

    began = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(f"long {i}", 150)) for i in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    ask("short", 6)
    for thread in threads:
        thread.join()
    assert ends["short"] < 0.5 * max(ends.values())
