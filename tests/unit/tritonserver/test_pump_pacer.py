from __future__ import annotations

import pytest

from inflight.api.response import Result
from inflight.tritonserver.pacer import FLUSH_SECONDS, MAX_UNPACED_RATE, StreamPacer


def delta(text: str) -> Result:
    return Result(
        is_final=False,
        text=text,
        output_token_ids=tuple(map(ord, text)),
        text_length=len(text),
        num_output_tokens=len(text),
    )


def flood(pacer: StreamPacer, now: float) -> None:
    """Other streams' deltas, more than go unpaced in any window."""
    for number in range(int(MAX_UNPACED_RATE)):
        pacer.push(10_000 + number, delta("x"), now)


def test_at_low_load_every_delta_goes_at_once() -> None:
    pacer = StreamPacer()
    for step in range(200):
        assert pacer.push(1, delta("a"), step * 0.01) == delta("a")
    assert pacer.seconds_to_next(2.0) is None


def test_the_first_delta_of_a_stream_always_goes_at_once() -> None:
    pacer = StreamPacer()
    flood(pacer, 5.0)
    assert pacer.push(1, delta("first"), 5.0) == delta("first")


def test_at_high_load_deltas_of_a_stream_wait_and_merge() -> None:
    pacer = StreamPacer()
    flood(pacer, 5.0)
    pacer.push(1, delta("first"), 5.0)
    assert pacer.push(1, delta("b"), 5.001) is None
    assert pacer.push(1, delta("c"), 5.002) is None
    assert pacer.seconds_to_next(5.002) == pytest.approx(FLUSH_SECONDS - 0.002)
    assert pacer.take_due(5.003) == []
    assert pacer.take_due(5.0 + FLUSH_SECONDS) == [(1, delta("bc"))]
    assert pacer.seconds_to_next(5.0 + FLUSH_SECONDS) is None


def test_a_delta_that_comes_when_one_is_due_takes_the_held_ones_along() -> None:
    pacer = StreamPacer()
    flood(pacer, 5.0)
    pacer.push(1, delta("first"), 5.0)
    pacer.push(1, delta("b"), 5.01)
    assert pacer.push(1, delta("c"), 5.0 + FLUSH_SECONDS) == delta("bc")


def test_load_that_has_gone_is_forgotten() -> None:
    pacer = StreamPacer()
    flood(pacer, 5.0)
    pacer.push(1, delta("first"), 5.0)
    assert pacer.push(1, delta("b"), 5.01) is None
    for step in range(3):
        pacer.push(2, delta("other"), 6.0 + step)
    pacer.close(1)
    pacer.push(1, delta("again"), 8.5)
    assert pacer.push(1, delta("c"), 8.501) == delta("c")


def test_close_gives_what_is_held_once() -> None:
    pacer = StreamPacer()
    flood(pacer, 5.0)
    pacer.push(1, delta("first"), 5.0)
    pacer.push(1, delta("b"), 5.001)
    assert pacer.close(1) == delta("b")
    assert pacer.close(1) is None
    assert pacer.take_due(9.0) == []


def test_nothing_is_lost_and_order_holds_whatever_the_load() -> None:
    pacer = StreamPacer()
    got = ""
    for step in range(2000):
        now = step * 0.0005
        sent = pacer.push(1, delta(chr(97 + step % 26)), now)
        if sent is not None:
            got += sent.text
        for _, due in pacer.take_due(now):
            got += due.text
    held = pacer.close(1)
    got += held.text if held is not None else ""
    assert got == "".join(chr(97 + step % 26) for step in range(2000))
