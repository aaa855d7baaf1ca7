"""The pump under load, its watch over clients, and its metrics."""

from __future__ import annotations

import pytest

from inflight.api.response import FinishReason
from inflight.api.stats import InflightBatchingStats, IterationStats, KvCacheStats
from inflight.errors import RequestFailedError
from inflight.tritonserver import pacer
from inflight.tritonserver.cancellation import SHARE_OF_TIME, CancellationWatch
from inflight.tritonserver.in_flight import InFlight, TritonRequest
from inflight.tritonserver.parsed import Door, RawRequest, Wants
from inflight.tritonserver.reply import Reply
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_pb_utils import ResponseSender
from tests.unit.tritonserver.service_kit import (
    metric,
    running_service,
    sends,
    stop_request,
    text_request,
    texts,
    value,
    wait_until,
)


def hold_deltas_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a response were very dear."""
    monkeypatch.setattr(pacer, "SENDING_SHARE", 1e-12)
    monkeypatch.setattr(pacer, "LONGEST_WAIT_SECONDS", seconds)


def test_at_high_load_tokens_travel_together_and_finals_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold_deltas_for(3600.0, monkeypatch)
    with running_service() as running:
        request = running.submit(text_request())
        (engine_id,) = running.executor.wait_for_requests(1)
        running.executor.say(engine_id, "a")
        wait_until(lambda: request.sender.sends, "the first delta, which goes at once")
        running.executor.say(engine_id, "b")
        running.executor.say(engine_id, "c")
        running.executor.finish(engine_id, text="d")
        assert texts(request) == ["a", "bcd", ""]


def test_a_held_delta_goes_when_its_time_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_deltas_for(0.03, monkeypatch)
    with running_service() as running:
        request = running.submit(text_request())
        (engine_id,) = running.executor.wait_for_requests(1)
        running.executor.say(engine_id, "a")
        wait_until(lambda: request.sender.sends, "the first delta")
        running.executor.say(engine_id, "b")
        wait_until(lambda: len(request.sender.sends) == 2, "the held delta")
        running.executor.finish(engine_id)
        assert texts(request) == ["a", "b", ""]


def test_held_text_comes_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_deltas_for(3600.0, monkeypatch)
    with running_service() as running:
        request = running.submit(text_request())
        (engine_id,) = running.executor.wait_for_requests(1)
        running.executor.say(engine_id, "a")
        wait_until(lambda: request.sender.sends, "the first delta")
        running.executor.say(engine_id, "b")
        wait_until(lambda: running.executor.num_unsent == 0, "the pump has taken it")
        running.executor.fail(engine_id, RequestFailedError("broken"))
        *data, last = sends(request)
        assert [value(send, "text_output") for send in data] == ["a", "b"]
        assert last.error == "internal error: broken"


def test_streams_are_not_mixed_up() -> None:
    with running_service() as running:
        names = [f"request-{number}" for number in range(20)]
        requests = {name: running.submit(text_request(name)) for name in names}
        ids = {name: running.executor.id_of(name) for name in names}
        for char_index in range(len(names[0])):
            for name in names:
                running.executor.say(ids[name], name[char_index])
        for name in reversed(names):
            running.executor.finish(ids[name], text="!" + name)
        for name, request in requests.items():
            whole = name[: len(names[0])] + "!" + name
            assert "".join(texts(request)) == whole


class Clock:
    """Each look at a client takes ``cost`` seconds of it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowSender(ResponseSender):
    def __init__(self, clock: Clock, cost: float) -> None:
        super().__init__()
        self.looks = 0
        self._clock, self._cost = clock, cost

    def is_cancelled(self) -> bool:
        self.looks += 1
        self._clock.now += self._cost
        return super().is_cancelled()


def watched(clock: Clock, number: int, cost: float) -> tuple[InFlight, list[SlowSender]]:
    in_flight = InFlight(FakeExecutor())  # type: ignore[arg-type]
    senders = [SlowSender(clock, cost) for _ in range(number)]
    for sender in senders:
        raw = RawRequest(
            triton_request_id="",
            door=Door.TEXT,
            stop=False,
            streaming=True,
            elements=({},),
            wants=Wants(),
            requested_outputs=frozenset(),
        )
        in_flight.open(TritonRequest(raw, Door.TEXT, Reply(sender)))
    return in_flight, senders


def test_the_watch_takes_turns_within_its_share_of_the_time() -> None:
    clock = Clock()
    period, per_poll = 0.01, 4
    cost = SHARE_OF_TIME * period / (per_poll - 0.5)
    in_flight, senders = watched(clock, 10, cost)
    watch = CancellationWatch(in_flight, period, clock)
    for poll in range(1, 7):  # a round of 10 takes 3 polls
        watch.poll()
        assert sum(sender.looks for sender in senders) <= per_poll * poll
        clock.now += period
    assert [sender.looks for sender in senders] == [2] * 10


def test_the_watch_rests_between_periods() -> None:
    clock = Clock()
    in_flight, (sender,) = watched(clock, 1, 0.0)
    watch = CancellationWatch(in_flight, 0.01, clock)
    for _ in range(5):
        watch.poll()
    assert sender.looks == 1


def test_one_look_is_taken_however_slow_the_server_is() -> None:
    clock = Clock()
    in_flight, senders = watched(clock, 3, 1.0)
    watch = CancellationWatch(in_flight, 0.01, clock)
    for _ in range(3):
        watch.poll()
        clock.now += 0.01
    assert [sender.looks for sender in senders] == [1, 1, 1]


def test_a_request_found_cancelled_is_not_asked_again() -> None:
    clock = Clock()
    in_flight, (sender,) = watched(clock, 1, 0.0)
    watch = CancellationWatch(in_flight, 0.01, clock)
    sender.cancelled = True
    watch.poll()
    assert [request.cancelled for request in in_flight.requests()] == [True]
    clock.now += 0.01
    watch.poll()
    assert sender.looks == 1


def iteration(number: int) -> IterationStats:
    return IterationStats(
        timestamp=5.0,
        iter=number,
        iter_latency_ms=1.0,
        token_gap_seconds=0.25,
        num_active_requests=1,
        max_num_active_requests=64,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=100, free_num_blocks=90, used_num_blocks=10, tokens_per_block=32
        ),
        inflight_batching_stats=InflightBatchingStats(num_scheduled_requests=1, num_gen_requests=1),
    )


def test_metrics_follow_the_life_of_a_request() -> None:
    with running_service() as running:
        running.submit(text_request("abc"))
        (engine_id,) = running.executor.wait_for_requests(1)
        running.executor.iteration_stats = [iteration(1), iteration(2)]
        running.executor.kv = iteration(2).kv_cache_stats
        active = metric("nv_trt_llm_request_metrics", request_type="active")
        wait_until(lambda: active.value() == 1, "the active request")
        assert metric("nv_trt_llm_general_metrics", general_type="iteration_counter").value() == 2
        used = metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
        wait_until(lambda: used.value() == 10, "the used blocks")
        assert metric("inflight_inter_token_latency_seconds").observations == [0.25, 0.25]

        running.executor.finish(engine_id, FinishReason.END_ID, text="xy")
        wait_until(lambda: active.value() == 0, "no active request")
        assert metric("inflight_requests_total", finish_reason="stop").value() == 1
        assert metric("inflight_input_tokens_total").value() == 3
        assert metric("inflight_output_tokens_total").value() == 2
        assert metric("nv_llm_input_token_len").observations == [3]
        assert metric("nv_llm_output_token_len").observations == [2]
        (queue_time,) = metric("inflight_queue_time_seconds").observations
        assert queue_time == pytest.approx(0.001)
        assert len(metric("inflight_end_to_end_seconds").observations) == 1


def test_refusals_errors_and_stops_are_counted() -> None:
    with running_service() as running:
        sends(running.submit(text_request("")))
        running.submit(text_request("x", request_id="x"))
        running.submit(text_request("y", request_id="y"))
        running.executor.fail(running.executor.id_of("x"), RequestFailedError("broken"))
        running.executor.id_of("y")
        running.submit(stop_request("y"))

        def counted() -> list[float]:
            return [
                metric("inflight_rejected_requests_total", reason="invalid").value(),
                metric("inflight_requests_total", finish_reason="error").value(),
                metric("inflight_requests_total", finish_reason="cancelled").value(),
            ]

        wait_until(lambda: sum(counted()) >= 3, "the counters")
        assert counted() == [1, 1, 1]


def test_an_idle_service_tells_the_server_nothing_new() -> None:
    with running_service(stats_check_period_ms=10) as running:
        blocks = metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
        active = metric("nv_trt_llm_request_metrics", request_type="active")
        wait_until(lambda: blocks.value() == 100, "the first push")
        running.submit(text_request())
        (engine_id,) = running.executor.wait_for_requests(1)
        running.executor.finish(engine_id)
        counter = metric("inflight_requests_total", finish_reason="length")
        wait_until(lambda: counter.value() == 1, "the push after the request")
        assert (blocks.updates, active.updates) == (1, 1)
