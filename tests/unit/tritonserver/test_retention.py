"""The retention tensors, through both doors, as the config that the KV cache reads."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.api import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.errors import InvalidRequestError
from tests.unit.tritonserver.asking import asking, built, parsed

STARTS, ENDS = "retention_token_range_starts", "retention_token_range_ends"
PRIORITIES = "retention_token_range_priorities"
DURATIONS = "retention_token_range_durations_ms"


@pytest.mark.parametrize("prompt", [{"text_input": "a b"}, {"input_ids": [1, 2]}])
def test_all_tensors_together(prompt: dict[str, Any]) -> None:
    request = built(
        **prompt,
        **{STARTS: [0, 16], ENDS: [16, -1], PRIORITIES: [90, -1], DURATIONS: [-1, 500]},
        retention_decode_priority=10,
        retention_decode_duration_ms=0,
    )
    assert request.kv_cache_retention_config == KvCacheRetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetentionConfig(token_start=0, token_end=16, priority=90),
            TokenRangeRetentionConfig(token_start=16, priority=35, duration_ms=500),
        ),
        decode_retention_priority=10,
        decode_duration_ms=0,
    )


def test_a_start_alone_is_a_range_with_defaults() -> None:
    config = built(**{STARTS: [3]}).kv_cache_retention_config
    assert config == KvCacheRetentionConfig(
        token_range_retention_configs=(TokenRangeRetentionConfig(token_start=3),)
    )


def test_the_decode_priority_alone() -> None:
    config = built(retention_decode_priority=0).kv_cache_retention_config
    assert config == KvCacheRetentionConfig(decode_retention_priority=0)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {STARTS: [-1], ENDS: [-1], PRIORITIES: [-1], DURATIONS: [-1]},
        {ENDS: [-1, -1]},
        {"retention_decode_priority": -1, "retention_decode_duration_ms": -1},
    ],
)
def test_what_says_nothing_is_no_retention(tensors: dict[str, Any]) -> None:
    assert built(**tensors).kv_cache_retention_config is None


def test_prompts_of_a_batch_have_their_own_ranges() -> None:
    request = asking(
        batch=True,
        text_input=["a", "b"],
        **{STARTS: [[0, 4], [0, -1]], PRIORITIES: [[50, 60], [70, -1]]},
    )
    first, second = parsed(request).requests
    for each, priorities in ((first, [50, 60]), (second, [70])):
        assert each.kv_cache_retention_config is not None
        ranges = each.kv_cache_retention_config.token_range_retention_configs
        assert [item.priority for item in ranges] == priorities


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({STARTS: [0, 4], ENDS: [4]}, f"{ENDS}: 1 values: must be as many as {STARTS}, 2"),
        ({PRIORITIES: [50]}, f"{PRIORITIES}: 1 values: must be as many"),
        ({STARTS: [-1], PRIORITIES: [50]}, f"{STARTS}: -1"),
        ({STARTS: [4], ENDS: [4]}, f"{ENDS}: 4 must be larger than its start 4"),
        ({STARTS: [0], PRIORITIES: [101]}, f"{PRIORITIES}: 101 must be between 0 and 100"),
        ({STARTS: [0], DURATIONS: [-2]}, f"{DURATIONS}: -2"),
        ({STARTS: [0] * 65}, f"{STARTS}: 65 values: at most 64"),
        ({"retention_decode_priority": 101}, "retention_decode_priority: 101"),
        ({"retention_decode_duration_ms": -2}, "retention_decode_duration_ms: -2"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tensors: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        built(**tensors)
