"""Eleven blocks of four tokens, and short ways to say what happens to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inflight.api import KvCacheConfig
from inflight.kv_cache import KvCache, KvCacheManager, KvExtent, PrefixIdentity

T = 4


def make_kv_cache(num_blocks: int = 11, **reuse: bool) -> KvCacheManager:
    """``reuse``: the switches of KvCacheConfig. Without a word, blocks are reused whole only."""
    config = KvCacheConfig(tokens_per_block=T, **{"enable_partial_reuse": False} | reuse)
    return KvCacheManager(num_blocks, config)


def tokens(*blocks: int, tail: int = 0) -> npt.NDArray[np.int32]:
    """Four tokens for each number (10 -> 10 11 12 13), then ``tail`` tokens 900, 901, ..."""
    ids = [first + i for first in blocks for i in range(T)]
    return np.array(ids + [900 + i for i in range(tail)], dtype=np.int32)


def extent(
    request_id: int, token_ids: npt.NDArray[np.int32], start: int = 0, end: int | None = None
) -> KvExtent:
    return KvExtent(request_id, start, token_ids[:end])


def run(
    kv: KvCache, request_id: int, token_ids: npt.NDArray[np.int32], salt: str | None = None
) -> int:
    """Opens a request and computes all its tokens in one iteration; returns the tokens reused."""
    kv.open(request_id, PrefixIdentity(salt))
    start = kv.match_prefix(request_id, token_ids).num_tokens
    step = [extent(request_id, token_ids, start)]
    kv.reserve(step)
    kv.commit(step)
    kv.check_integrity()
    return start


def table(kv: KvCacheManager, request_id: int) -> list[int]:
    ids: list[int] = kv.block_table(request_id).tolist()
    return ids


def take_all(kv: KvCacheManager, request_id: int) -> list[int]:
    """Fills the free part of the pool with one request: its table is the order of eviction."""
    count = kv.num_free_blocks
    token_ids = np.arange(5000, 5000 + count * T, dtype=np.int32)
    kv.open(request_id)
    kv.reserve([extent(request_id, token_ids)])
    return table(kv, request_id)


def counts(kv: KvCacheManager, request_id: int) -> Sequence[int]:
    return tuple(kv.request_counts(request_id))
