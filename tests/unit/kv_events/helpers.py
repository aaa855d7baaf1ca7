"""Blocks as a KV cache tells them, and a cache whose blocks are told to a queue."""

from __future__ import annotations

from inflight.api import KvCacheConfig
from inflight.kv_cache import KvCacheManager
from inflight.kv_events.changes import CachedBlock, ChangeQueue, TierObserver
from tests.unit.kv_cache.helpers import T


def cached(number: int, parent: int | None = None, medium: str = "GPU") -> CachedBlock:
    """A block whose published hash is ``number``, holding the tokens number, number, ..."""
    return CachedBlock(
        number.to_bytes(32, "big"),
        medium,
        None if parent is None else parent.to_bytes(32, "big"),
        number.to_bytes(4, "little") * T,
    )


def cache_with_queue(num_blocks: int, max_queued: int = 1000) -> tuple[KvCacheManager, ChangeQueue]:
    queue = ChangeQueue(max_queued)
    kv = KvCacheManager(
        num_blocks, KvCacheConfig(tokens_per_block=T), observers=[TierObserver(queue, "GPU")]
    )
    return kv, queue
