"""MetricLedger: what the metrics stand at, and what of it the server has not been told yet.

An update of one of Triton's metrics is a round trip to the server process (some tens of
microseconds), so changes gather here and are drained a few times a second.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from inflight.observability.families import FAMILIES, Family, MetricKind


class Series(NamedTuple):
    """One line of a family: its name and the value of its own label ("" without one)."""

    family: str
    label_value: str


class Update(NamedTuple):
    """What to tell the server: set a gauge, add to a counter, or observe in a histogram."""

    series: Series
    kind: MetricKind
    value: float


_KINDS = {family.name: family.kind for family in FAMILIES}
_KNOWN = {Series(family.name, value) for family in FAMILIES for value in family.label_values}


class MetricLedger:
    """Thread-safe. Using a family or label value that is not in FAMILIES is a bug of ours."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[Series, float] = {}
        self._told: dict[Series, float] = {}
        self._added: dict[Series, float] = {}
        self._totals: dict[Series, float] = {}
        self._observed: list[Update] = []

    def set(self, family: Family, label_value: str, value: float) -> None:
        """The gauge stands at ``value``."""
        series = _series(family, label_value, MetricKind.GAUGE)
        with self._lock:
            self._gauges[series] = value

    def add(self, family: Family, amount: float, label_value: str = "") -> None:
        """The counter grows by ``amount`` >= 0."""
        assert amount >= 0, "a counter never falls"
        series = _series(family, label_value, MetricKind.COUNTER)
        with self._lock:
            self._added[series] = self._added.get(series, 0.0) + amount

    def raise_to(self, family: Family, total: float, label_value: str = "") -> None:
        """The counter follows a total kept elsewhere; a total that fell adds nothing."""
        series = _series(family, label_value, MetricKind.COUNTER)
        with self._lock:
            grown = total - self._totals.get(series, 0.0)
            if grown > 0:
                self._totals[series] = total
                self._added[series] = self._added.get(series, 0.0) + grown

    def observe(self, family: Family, value: float, label_value: str = "") -> None:
        """One observation for the histogram."""
        series = _series(family, label_value, MetricKind.HISTOGRAM)
        with self._lock:
            self._observed.append(Update(series, MetricKind.HISTOGRAM, value))

    def drain(self) -> list[Update]:
        """Everything that changed since the last call; gauges only where their value differs."""
        with self._lock:
            updates = [
                Update(series, MetricKind.GAUGE, value)
                for series, value in self._gauges.items()
                if self._told.get(series) != value
            ]
            self._told.update(self._gauges)
            updates += [
                Update(series, MetricKind.COUNTER, amount)
                for series, amount in self._added.items()
                if amount > 0
            ]
            self._added.clear()
            updates += self._observed
            self._observed = []
        return updates


def _series(family: Family, label_value: str, kind: MetricKind) -> Series:
    series = Series(family.name, label_value)
    assert _KINDS[family.name] is kind and series in _KNOWN, f"{series} is no {kind.value}"
    return series
