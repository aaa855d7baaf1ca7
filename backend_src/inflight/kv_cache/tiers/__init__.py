"""Tiers under the KV cache: evicted blocks in host memory and on disk, and the way back."""

from inflight.kv_cache.tiers.cascade import TierCascade
from inflight.kv_cache.tiers.disk import DiskStorage
from inflight.kv_cache.tiers.host import HostStorage
from inflight.kv_cache.tiers.onboarding import KvTiers

__all__ = ["DiskStorage", "HostStorage", "KvTiers", "TierCascade"]
