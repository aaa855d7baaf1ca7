"""What the benchmark takes away from the scheduler is there to be taken away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from inflight.batch import LlmRequest
from inflight.scheduler import capacity
from tests.benchmarks.oversubscription import no_hysteresis


def test_without_hysteresis_a_request_looks_no_further_than_its_next_token() -> None:
    request = cast(LlmRequest, SimpleNamespace(num_tokens=80, max_total_tokens=500))
    last = cast(LlmRequest, SimpleNamespace(num_tokens=80, max_total_tokens=80))
    assert capacity._horizon(request) == 80 + capacity.LEAST_HORIZON
    with no_hysteresis():
        assert capacity._horizon(request) == 81 and capacity._horizon(last) == 80
    assert capacity._horizon(request) == 80 + capacity.LEAST_HORIZON
