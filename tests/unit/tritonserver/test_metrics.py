from __future__ import annotations

import pytest

from inflight.observability import families
from inflight.observability.families import FAMILIES, Family, MetricKind
from inflight.observability.ledger import MetricLedger, Series, Update
from inflight.tritonserver.in_flight import InFlight
from inflight.tritonserver.metrics import MetricsReporter, TritonMetrics
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_pb_utils import MetricFamily
from tests.unit.tritonserver.service_kit import metric

KINDS = {
    MetricKind.COUNTER: MetricFamily.COUNTER,
    MetricKind.GAUGE: MetricFamily.GAUGE,
    MetricKind.HISTOGRAM: MetricFamily.HISTOGRAM,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_series_exists_from_the_start(family: Family) -> None:
    TritonMetrics("llm", "3")
    made = MetricFamily.registry[family.name]
    assert made.kind == KINDS[family.kind]
    assert len(made.metrics) == len(family.label_values)
    for label_value in family.label_values:
        own = {family.label: label_value} if family.label else {}
        found = made.metric(**own)
        assert found.labels == {"model": "llm", "version": "3"} | own
        assert found.buckets == family.buckets


def test_updates_arrive_by_kind() -> None:
    ledger = MetricLedger()
    ledger.set(families.REQUESTS, "active", 4)
    ledger.add(families.INPUT_TOKENS, 7)
    ledger.add(families.INPUT_TOKENS, 3)
    ledger.observe(families.QUEUE_TIME, 0.5)
    ledger.observe(families.QUEUE_TIME, 1.5)
    TritonMetrics("llm", "3").push(ledger.drain())
    assert metric("nv_trt_llm_request_metrics", request_type="active").value() == 4
    assert metric("inflight_input_tokens_total").value() == 10
    assert metric("inflight_input_tokens_total").updates == 1
    assert metric("inflight_queue_time_seconds").observations == [0.5, 1.5]


def test_a_counter_is_never_decremented() -> None:
    series = Series("inflight_input_tokens_total", "")
    TritonMetrics("llm", "3").push([Update(series, MetricKind.COUNTER, -1.0)])
    assert metric("inflight_input_tokens_total").updates == 0


def test_one_faulty_update_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_metrics = TritonMetrics("llm", "3")

    def broken(_: float) -> None:
        raise RuntimeError("the server said no")

    monkeypatch.setattr(metric("inflight_input_tokens_total"), "increment", broken)
    triton_metrics.push(
        [
            Update(Series("inflight_input_tokens_total", ""), MetricKind.COUNTER, 1.0),
            Update(Series("inflight_output_tokens_total", ""), MetricKind.COUNTER, 2.0),
        ]
    )
    assert metric("inflight_output_tokens_total").value() == 2


def test_a_reporter_that_cannot_report_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(executor, "kv_cache_stats", broken)
    in_flight = InFlight(executor)  # type: ignore[arg-type]
    reporter = MetricsReporter(executor, in_flight, TritonMetrics("llm", "3"), 60.0)  # type: ignore[arg-type]
    reporter.report()
    monkeypatch.undo()
    reporter.report()  # the period has not passed
    assert metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max").updates == 0
