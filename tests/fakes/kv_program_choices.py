"""What a KvProgram chooses from."""

from __future__ import annotations

from random import Random

from inflight.api import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.kv_cache import BlockRetention

SALTS = (None, None, "", "tenant")
PREFIXES = ([0] * 8, [0] * 5, [0, 0, 1, 1, 0, 0, 1, 1], [])
OUTCOMES = (
    "written",
    "written",
    "written",
    "written",
    "written",
    "failed",
    "failed and retried",
    "not even copied",
)


def a_retention(rng: Random, prompt_length: int) -> BlockRetention | None:
    if rng.random() < 0.6:
        return None
    duration_ms = rng.choice((None, 1000))
    item = TokenRangeRetentionConfig(
        token_start=rng.randint(0, 4),
        priority=rng.choice((0, 35, 100)),
        duration_ms=duration_ms,
    )
    config = KvCacheRetentionConfig(
        token_range_retention_configs=(item,),
        decode_retention_priority=rng.choice((0, 35, 100)),
        decode_duration_ms=duration_ms,
    )
    return BlockRetention(config, prompt_length)
