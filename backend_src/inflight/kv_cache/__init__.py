"""The paged KV cache's books: blocks, tables, reference counts, prefix reuse. See README.md."""

from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.sequence import RequestCounts

__all__ = ["KvCacheManager", "KvExtent", "RequestCounts"]
