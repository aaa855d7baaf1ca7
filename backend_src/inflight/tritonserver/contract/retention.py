"""The inputs that say how long a request's KV blocks are worth keeping.

``tritonserver/retention.py`` reads them, ``api/kv.py`` enforces the ranges.
"""

from __future__ import annotations

from inflight.tritonserver.contract.types import Dtype, InputField

RETENTION: tuple[InputField, ...] = (
    InputField(
        field="retention_token_range_starts",
        dtype=Dtype.INT32,
        dims=(-1,),
        text_names=("retention_token_range_starts",),
        meaning="Ranges of prompt tokens whose KV blocks are kept by a priority of their own: the "
        "first token of each; -1: no range",
        range="at most 64 ranges; the other lists are as long",
        equals="Executor: kvCacheRetentionConfig",
    ),
    InputField(
        field="retention_token_range_ends",
        dtype=Dtype.INT32,
        dims=(-1,),
        text_names=("retention_token_range_ends",),
        meaning="The token after each range; -1: to the end of the prompt",
        range="larger than its start",
        default="-1 for all",
    ),
    InputField(
        field="retention_token_range_priorities",
        dtype=Dtype.INT32,
        dims=(-1,),
        text_names=("retention_token_range_priorities",),
        meaning="Blocks of a lower priority are evicted first; -1: the default",
        range="0 to 100",
        default="35",
    ),
    InputField(
        field="retention_token_range_durations_ms",
        dtype=Dtype.INT32,
        dims=(-1,),
        text_names=("retention_token_range_durations_ms",),
        meaning="For how long the priority counts once no request uses the block; -1: for ever",
        range="0 or larger",
        default="-1 for all",
    ),
    InputField(
        field="retention_decode_priority",
        dtype=Dtype.INT32,
        text_names=("retention_decode_priority",),
        meaning="The priority of blocks of generated tokens; -1: the default",
        range="0 to 100",
        default="35",
    ),
    InputField(
        field="retention_decode_duration_ms",
        dtype=Dtype.INT32,
        text_names=("retention_decode_duration_ms",),
        meaning="For how long it counts once no request uses the block; -1: for ever",
        range="0 or larger",
        default="-1",
    ),
)
