"""EngineParts: what the loop conducts."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.api.stats import KvCacheStats
from inflight.engine.inbox import Inbox
from inflight.engine.lane import ForwardLane
from inflight.engine.onboarder import Onboarder
from inflight.engine.responder import Responder
from inflight.engine.statistics import StatsRecorder
from inflight.kv_cache.pools import KvCache
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner
from inflight.sampling.sampler import Sampler
from inflight.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Each part owns its own facts."""

    scheduler: Scheduler
    kv: KvCache
    packer: Packer
    runner: ModelRunner
    sampler: Sampler
    lane: ForwardLane
    inbox: Inbox
    responder: Responder
    stats: StatsRecorder
    onboarder: Onboarder | None = None
    """None: there are no tiers below the primary pool."""

    def kv_cache_stats(self) -> KvCacheStats:
        """Of the primary pool and the tiers; safe from any thread."""
        stats = self.kv.stats()
        return stats if self.onboarder is None else self.onboarder.add_to(stats)
