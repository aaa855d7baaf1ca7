"""What became of a plan: first it is computed, then settled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inflight.batch.plan import ScheduledBatch
from inflight.kv_cache.extent import KvExtent
from inflight.sampling.sampler import SampledTokens


class ComputedIteration(NamedTuple):
    """Nothing of it has reached its requests yet. Times are clock seconds."""

    plan: ScheduledBatch
    extents: Sequence[KvExtent]
    """What ``reserve`` made room for, and ``commit`` has still to hear of."""
    outcome: SampledTokens | Exception
    """A token for each chunk that samples, in order; or what the forward or the sampler raised."""
    began: float
    """When the step that planned it began."""
    ended: float
    """When the outcome was there."""


class SettledIteration(NamedTuple):
    """KV and tokens are with the requests; clients and statistics have not heard of it yet."""

    plan: ScheduledBatch
    num_generated: int
    """Tokens that were sampled for requests that still wanted them."""
    began: float
    ended: float
