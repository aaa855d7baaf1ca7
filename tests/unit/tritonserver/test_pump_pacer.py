from __future__ import annotations

import pytest

from inflight.api.response import Result
from inflight.tritonserver.pacer import (
    CPU_OF_ALL,
    LONGEST_WAIT_SECONDS,
    MACHINE_SHARE,
    SENDING_SHARE,
    StreamPacer,
)

MANY_CORES = 64


def delta(text: str) -> Result:
    return Result(
        is_final=False,
        text=text,
        output_token_ids=tuple(map(ord, text)),
        text_length=len(text),
        num_output_tokens=len(text),
    )


def busy_pacer(
    *, cost: float = 0.001, others: int = 31, num_cores: int = MANY_CORES
) -> StreamPacer:
    """``others`` streams have had a delta, and a response takes ``cost`` seconds to send, all of
    them on a core."""
    pacer = StreamPacer(num_cores)
    for _ in range(500):
        pacer.sent(cost, cost)
    for number in range(others):
        pacer.push(10_000 + number, delta("x"), 5.0)
    return pacer


def test_a_stream_alone_gets_each_delta_at_once() -> None:
    pacer = busy_pacer(others=0)
    for step in range(200):
        assert pacer.push(1, delta("a"), step * 0.0101) == delta("a")
    assert pacer.seconds_to_next(2.0) is None


def test_what_costs_nothing_yet_goes_at_once() -> None:
    pacer = StreamPacer(MANY_CORES)
    for stream in range(100):
        pacer.push(stream, delta("a"), 1.0)
        assert pacer.push(stream, delta("b"), 1.0) == delta("b")


def test_the_first_delta_of_a_stream_always_goes_at_once() -> None:
    assert busy_pacer().push(1, delta("first"), 5.0) == delta("first")


@pytest.mark.parametrize(
    ("num_cores", "share"),
    [
        (1, MACHINE_SHARE / CPU_OF_ALL),
        (2, 2 * MACHINE_SHARE / CPU_OF_ALL),
        (MANY_CORES, SENDING_SHARE),
    ],
)
def test_the_wait_is_the_cost_of_all_streams_in_its_share_of_the_time(
    num_cores: int, share: float
) -> None:
    pacer = busy_pacer(cost=0.0003, others=7, num_cores=num_cores)
    pacer.push(1, delta("first"), 5.0)
    assert pacer.push(1, delta("b"), 5.001) is None
    assert pacer.push(1, delta("c"), 5.002) is None
    wait = 8 * 0.0003 / share
    assert pacer.seconds_to_next(5.002) == pytest.approx(wait - 0.002)
    assert pacer.take_due(5.0 + 0.9 * wait) == []
    assert pacer.take_due(5.0 + 1.1 * wait) == [(1, delta("bc"))]
    assert pacer.seconds_to_next(5.0 + 1.1 * wait) is None


def test_time_that_sending_sleeps_takes_from_no_core() -> None:
    pacer = StreamPacer(num_cores=1)
    for _ in range(500):
        pacer.sent(0.01, 0.0)
    pacer.push(1, delta("first"), 5.0)
    pacer.push(1, delta("b"), 5.0)
    assert pacer.seconds_to_next(5.0) == pytest.approx(0.01 / SENDING_SHARE)


def test_no_stream_waits_longer_than_the_longest_wait() -> None:
    pacer = busy_pacer(cost=1.0)
    pacer.push(1, delta("first"), 5.0)
    assert pacer.push(1, delta("b"), 5.0) is None
    assert pacer.seconds_to_next(5.0) == pytest.approx(LONGEST_WAIT_SECONDS)
    assert pacer.push(1, delta("c"), 5.01 + LONGEST_WAIT_SECONDS) == delta("bc")


def test_streams_that_have_ended_make_nobody_wait() -> None:
    pacer = busy_pacer(cost=0.0005)
    pacer.push(1, delta("first"), 5.0)
    assert pacer.push(1, delta("b"), 5.01) is None
    for number in range(31):
        pacer.close(10_000 + number)
    assert pacer.push(1, delta("c"), 5.02) == delta("bc")


def test_close_gives_what_is_held_once() -> None:
    pacer = busy_pacer()
    pacer.push(1, delta("first"), 5.0)
    pacer.push(1, delta("b"), 5.001)
    assert pacer.close(1) == delta("b")
    assert pacer.close(1) is None
    assert pacer.take_due(9.0) == []


def test_nothing_is_lost_and_order_holds_whatever_the_load() -> None:
    pacer = busy_pacer(others=0)
    got = ""
    for step in range(2000):
        now = 6.0 + step * 0.0005
        pacer.sent(step % 7 / 1000, step % 5 / 10_000)
        sent = pacer.push(1, delta(chr(97 + step % 26)), now)
        if sent is not None:
            got += sent.text
        for _, due in pacer.take_due(now):
            got += due.text
    held = pacer.close(1)
    got += held.text if held is not None else ""
    assert got == "".join(chr(97 + step % 26) for step in range(2000))
