from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.observability.families import FAMILIES, Family, MetricKind, markdown_table

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def family(name: str) -> Family:
    (found,) = [each for each in FAMILIES if each.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "label", "label_values"),
    [
        (
            "nv_trt_llm_request_metrics",
            "request_type",
            {"active", "max", "scheduled", "context", "waiting"},
        ),
        ("nv_trt_llm_runtime_memory_metrics", "memory_type", {"cpu", "gpu", "pinned"}),
        (
            "nv_trt_llm_kv_cache_block_metrics",
            "kv_cache_block_type",
            {"max", "free", "used", "tokens_per", "reused", "fraction"},
        ),
        (
            "nv_trt_llm_inflight_batcher_metrics",
            "inflight_batcher_specific_metric",
            {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
        ),
        ("nv_trt_llm_general_metrics", "general_type", {"timestamp", "iteration_counter"}),
    ],
)
def test_gauges_of_tensorrt_llm(name: str, label: str, label_values: set[str]) -> None:
    found = family(name)
    assert (found.kind, found.label) == (MetricKind.GAUGE, label)
    assert set(found.label_values) == label_values


@pytest.mark.parametrize("which", ["input", "output"])
def test_length_histograms_of_tensorrt_llm(which: str) -> None:
    found = family(f"nv_llm_{which}_token_len")
    assert (found.kind, found.label) == (MetricKind.HISTOGRAM, "response_metric_type")
    assert found.label_values == (f"total_{which}_tokens",)
    assert found.buckets == (10, 50, 100, 500, 1000)


@pytest.mark.parametrize("each", FAMILIES, ids=lambda each: each.name)
def test_families_are_well_formed(each: Family) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", each.name)
    assert (each.kind is MetricKind.HISTOGRAM) == bool(each.buckets)
    assert list(each.buckets) == sorted(set(each.buckets))
    assert each.label_values == ("",) if not each.label else "" not in each.label_values


def test_names_are_unique() -> None:
    assert len({each.name for each in FAMILIES}) == len(FAMILIES)


def test_the_documentation_holds_the_table() -> None:
    assert markdown_table() in DOCS.read_text()
