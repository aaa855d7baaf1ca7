"""The paged KV cache's books: blocks, tables, reference counts, prefix reuse. See README.md."""

from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.identity import PrefixIdentity
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.observer import (
    NO_OBSERVERS,
    BlockObserver,
    CacheObservers,
    ObservedBlock,
    ObservedPool,
)
from inflight.kv_cache.pools import KvCache, KvCachePools, make_kv_cache
from inflight.kv_cache.reservation import BlockCopies
from inflight.kv_cache.retention import BlockRetention
from inflight.kv_cache.sequence import RequestCounts

__all__ = [
    "NO_OBSERVERS",
    "BlockCopies",
    "BlockObserver",
    "BlockRetention",
    "CacheObservers",
    "KvCache",
    "KvCacheManager",
    "KvCachePools",
    "KvExtent",
    "ObservedBlock",
    "ObservedPool",
    "PrefixIdentity",
    "RequestCounts",
    "make_kv_cache",
]
