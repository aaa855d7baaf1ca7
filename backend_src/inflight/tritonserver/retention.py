"""The ``retention_*`` fields of a request as a KvCacheRetentionConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.api.kv import (
    DEFAULT_RETENTION_PRIORITY,
    MAX_TOKEN_RANGES,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
)
from inflight.errors import InvalidRequestError

UNSTATED = -1
"""TensorRT-LLM's way to leave an element of these tensors open."""

_RANGES = "retention_token_range_"


def retention_config(fields: Mapping[str, Any]) -> KvCacheRetentionConfig | None:
    """None where no field says anything. Raises InvalidRequestError that names the field."""
    starts = _list(fields, "starts", None)
    columns = [_list(fields, name, len(starts)) for name in ("ends", "priorities", "durations_ms")]
    ranges = []
    for start, end, priority, duration_ms in zip(starts, *columns, strict=True):
        if start == end == priority == duration_ms == UNSTATED:
            continue  # padding
        ranges.append(
            TokenRangeRetentionConfig(
                token_start=start,
                token_end=_stated(end),
                priority=DEFAULT_RETENTION_PRIORITY if priority == UNSTATED else priority,
                duration_ms=_stated(duration_ms),
            )
        )
    decode_priority = fields.get("retention_decode_priority", UNSTATED)
    decode_duration_ms = fields.get("retention_decode_duration_ms", UNSTATED)
    if not ranges and decode_priority == decode_duration_ms == UNSTATED:
        return None
    return KvCacheRetentionConfig(
        token_range_retention_configs=tuple(ranges),
        decode_retention_priority=(
            DEFAULT_RETENTION_PRIORITY if decode_priority == UNSTATED else decode_priority
        ),
        decode_duration_ms=_stated(decode_duration_ms),
    )


def _stated(value: int) -> int | None:
    return None if value == UNSTATED else value


def _list(fields: Mapping[str, Any], name: str, length: int | None) -> list[int]:
    """The numbers of one column; open ones where the request has none of that name."""
    field = _RANGES + name
    if field not in fields:
        return [UNSTATED] * (length or 0)
    if len(fields[field]) > MAX_TOKEN_RANGES:
        raise InvalidRequestError(
            field, len(fields[field]), f"values: at most {MAX_TOKEN_RANGES} are allowed"
        )
    values: list[int] = fields[field].tolist()
    if length is not None and len(values) != length:
        if set(values) <= {UNSTATED}:
            return [UNSTATED] * length
        raise InvalidRequestError(
            field, len(values), f"values: must be as many as {_RANGES}starts, {length}"
        )
    return values
