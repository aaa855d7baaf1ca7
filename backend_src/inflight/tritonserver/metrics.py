"""From the executor's statistics to the server's /metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from inflight.observability.engine_metrics import EngineMetrics
from inflight.observability.families import FAMILIES, Family, MetricKind
from inflight.observability.ledger import Series, Update
from inflight.tritonserver.in_flight import InFlight

if TYPE_CHECKING:
    from inflight.executor import Executor

logger = logging.getLogger(__name__)


class TritonMetrics:
    """All series of FAMILIES, made at once so that they are visible, at 0, from the start.

    Each update is a round trip to the server; call ``push`` a few times a second, from one thread.
    """

    def __init__(self, model_name: str, model_version: str) -> None:
        labels = {"model": model_name, "version": model_version}
        # The server drops a family's metrics when the family object goes, so both are kept.
        self._families: list[Any] = []
        self._metrics: dict[Series, Any] = {}
        for family in FAMILIES:
            self._add(family, labels)

    def push(self, updates: Iterable[Update]) -> None:
        """Tells the server; a fault is logged and the remaining updates still go."""
        for series, kind, value in updates:
            metric = self._metrics[series]
            try:
                if kind is MetricKind.GAUGE:
                    metric.set(value)
                elif kind is MetricKind.HISTOGRAM:
                    metric.observe(value)
                elif value > 0:  # a negative increment would end the whole server
                    metric.increment(value)
            except Exception as error:  # the server's own exceptions
                logger.warning("metric %s: %s", series.family, type(error).__name__)

    def _add(self, family: Family, labels: dict[str, str]) -> None:
        pb_family = pb_utils.MetricFamily(
            name=family.name, description=family.description, kind=_pb_kind(family.kind)
        )
        self._families.append(pb_family)
        for label_value in family.label_values:
            own = {family.label: label_value} if family.label else {}
            arguments: dict[str, Any] = {"labels": labels | own}
            if family.kind is MetricKind.HISTOGRAM:
                arguments["buckets"] = list(family.buckets)
            self._metrics[Series(family.name, label_value)] = pb_family.Metric(**arguments)


def _pb_kind(kind: MetricKind) -> Any:
    # Not a table of the module: the stub in which the server checks a model's configuration imports
    # it too, and has no MetricFamily there.
    return {
        MetricKind.COUNTER: pb_utils.MetricFamily.COUNTER,
        MetricKind.GAUGE: pb_utils.MetricFamily.GAUGE,
        MetricKind.HISTOGRAM: pb_utils.MetricFamily.HISTOGRAM,
    }[kind]


class MetricsReporter:
    """Gathers from the executor and tells the server: each period, and when the engine falls idle.

    The push at idle is there so that no gauge goes on showing a load that has gone. Used by one
    thread; ``metrics`` may be fed by any.
    """

    def __init__(
        self,
        executor: Executor,
        in_flight: InFlight,
        triton_metrics: TritonMetrics,
        period_seconds: float,
    ) -> None:
        self.metrics = EngineMetrics()
        self._executor = executor
        self._in_flight = in_flight
        self._triton_metrics = triton_metrics
        self._period = period_seconds
        self._next_time = 0.0
        self._was_idle = True

    def report(self) -> None:
        """Call it often; it does nothing until something is due. Never raises."""
        now = time.monotonic()
        is_idle = self._in_flight.num_elements == 0
        fell_idle = is_idle and not self._was_idle
        self._was_idle = is_idle
        if now < self._next_time and not fell_idle:
            return
        self._next_time = now + self._period
        try:
            self._push(is_idle)
        except Exception as error:  # metrics are never worth an answer
            logger.error("metrics could not be pushed", exc_info=error)

    def _push(self, is_idle: bool) -> None:
        self.metrics.iterations(self._executor.get_latest_iteration_stats())
        if is_idle:
            self.metrics.idle()
        self.metrics.kv_cache(self._executor.kv_cache_stats())
        events = self._executor.kv_event_stats()
        if events is not None:
            self.metrics.kv_events(events)
        self._triton_metrics.push(self.metrics.drain())
