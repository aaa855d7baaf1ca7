"""Outcome: what a simulation has seen, in numbers that can be compared and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from inflight.api import CapacitySchedulerPolicy
from inflight.api.stats import KvOnboardingStats, KvTierStats


class Percentiles(NamedTuple):
    """Of a time in seconds; all 0 where nothing was measured."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        if not len(seconds):
            return cls(0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        return cls(p50, p90, p99)


class Moment(NamedTuple):
    """A point of the timeline, after an iteration."""

    seconds: float
    batch_fill: float
    """Rows / max_batch_size."""
    kv_use: float
    """Blocks that requests hold / blocks."""
    num_waiting: int
    host_use: float = 0.0
    """Bytes in host memory / kv_cache_host_memory_bytes."""
    disk_use: float = 0.0
    """Bytes on disk / kv_cache_disk_bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Averages are over simulated time in which something was computed."""

    policy: CapacitySchedulerPolicy
    num_blocks: int
    tokens_per_block: int
    num_completed: int
    num_refused: int
    """Beyond a limit of the configuration; they take no part in anything below."""
    first_refusal: str
    """What the first of them was told; "" where there is none."""
    num_iterations: int
    simulated_seconds: float
    """From the first arrival to the last token."""
    wall_seconds: float
    """What the simulation itself took."""
    num_generated_tokens: int
    num_context_tokens: int
    """Context tokens that were computed, also those computed again after a pause."""
    num_reused_tokens: int
    """Context tokens that were in the KV cache already."""
    num_pauses: int
    num_paused_requests: int
    """Requests that were paused at least once."""
    batch_fill: float
    """Rows that ran / max_batch_size."""
    token_fill: float
    """Tokens computed / max_num_tokens."""
    kv_use: float
    """Blocks that requests hold / blocks."""
    peak_kv_use: float
    """The largest share of blocks that requests held after an iteration."""
    waste: float
    """Slots of held blocks without a token / slots of held blocks."""
    mean_started: float
    """Requests that hold blocks at once."""
    mean_waiting: float
    cache_hit_rate: float
    """Blocks reused / blocks looked up, wherever they were."""
    tiers: tuple[KvTierStats, ...] = ()
    """As the engine counts them; empty: there are none."""
    onboarding: KvOnboardingStats | None = None
    num_onboarded_tokens: dict[str, int] = field(default_factory=dict)
    """By tier: tokens that were brought back into the pool. They are among ``num_reused_tokens``
    but for what was evicted again before anybody used it."""
    bound_by: dict[str, float]
    """Share of the time in which a limit kept work waiting: ``max_batch_size``,
    ``max_num_tokens``, ``kv_cache``; ``nothing`` is the rest."""
    time_to_first_token: Percentiles
    inter_token: Percentiles
    latency: Percentiles
    """From arrival to the last token."""
    timeline: tuple[Moment, ...]

    @property
    def name(self) -> str:
        """Tells it from the other outcomes of a comparison."""
        return self.policy.value + (" + tiers" if self.tiers else "")

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a simulated second."""
        return self.num_generated_tokens / max(self.simulated_seconds, 1e-12)

    @property
    def iterations_per_minute(self) -> float:
        """Simulated iterations in a minute of real time."""
        return 60 * self.num_iterations / max(self.wall_seconds, 1e-12)

    def to_json(self) -> dict[str, Any]:
        """All of it but the timeline; percentiles as objects."""
        fields = asdict(self)
        del fields["timeline"]
        fields["policy"] = self.policy.value
        for name in ("time_to_first_token", "inter_token", "latency"):
            fields[name] = getattr(self, name)._asdict()
        return fields | {
            "tokens_per_second": self.tokens_per_second,
            "iterations_per_minute": self.iterations_per_minute,
        }
