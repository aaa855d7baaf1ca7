"""Meter: counts what a simulation does, in bounded memory but for one number a token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from inflight.api import ExecutorConfig
from inflight.api.stats import BindingLimit
from inflight.batch import LlmRequest, ScheduledBatch
from inflight.kv_cache import KvCache
from inflight.kv_cache.tiers import KvTiers
from inflight.simulator.outcome import Moment, Outcome, Percentiles

_WASTE_PERIOD = 16
"""Iterations from one look at every held block to the next."""

_MOST_MOMENTS = 2048

_LIMIT_NAMES = {
    BindingLimit.ROWS: "max_batch_size",
    BindingLimit.TOKENS: "max_num_tokens",
    BindingLimit.BLOCKS: "kv_cache",
    BindingLimit.QUEUE: "nothing",
}
"""By what a user would configure."""


class Meter:
    """Told by the simulation, in its order; changes nothing."""

    def __init__(self, config: ExecutorConfig, kv: KvCache, tiers: KvTiers | None = None) -> None:
        """``tiers``: below ``kv``. Blocks and their use are those of its first pool."""
        self._config = config
        self._cache, self._kv = kv, kv.pools[0]
        self._tiers = tiers
        self._num_refused = 0
        self._first_refusal = ""
        self._num_iterations = 0
        self._num_context = self._num_reused = 0
        self._num_pauses = self._num_paused = self._num_completed = 0
        self._computing_seconds = 0.0
        self._row_seconds = self._token_seconds = self._block_seconds = 0.0
        self._started_seconds = self._waiting_seconds = 0.0
        self._most_used = 0
        self._bound_seconds = dict.fromkeys(BindingLimit, 0.0)
        self._unfilled_slots = self._held_slots = 0
        self._last_token: dict[int, float] = {}
        self._first_tokens, self._gaps, self._latencies = array("d"), array("d"), array("d")
        self._timeline = _Timeline()

    def refused(self, reason: str) -> None:
        self._num_refused += 1
        self._first_refusal = self._first_refusal or reason

    def started(self, num_reused_tokens: int) -> None:
        self._num_reused += num_reused_tokens

    def token(self, llm: LlmRequest, now: float) -> None:
        last = self._last_token.get(llm.request_id)
        self._last_token[llm.request_id] = now
        if last is None:
            self._first_tokens.append(now - llm.arrival_time)
        else:
            self._gaps.append(now - last)

    def ended(self, llm: LlmRequest, now: float) -> None:
        del self._last_token[llm.request_id]
        self._latencies.append(now - llm.arrival_time)
        self._num_completed += 1
        self._num_pauses += llm.num_pauses
        self._num_paused += llm.num_pauses > 0

    def iteration(
        self,
        plan: ScheduledBatch,
        started: Sequence[LlmRequest],
        num_waiting: int,
        now: float,
        seconds: float,
    ) -> None:
        """It ended at ``now`` and took so long; whoever has their last token is still there."""
        num_rows, num_tokens = plan.num_chunks, plan.num_tokens
        num_used = self._kv.num_blocks - self._kv.num_free_blocks
        self._num_iterations += 1
        self._num_context += plan.num_context_tokens
        self._computing_seconds += seconds
        self._row_seconds += num_rows * seconds
        self._token_seconds += num_tokens * seconds
        self._block_seconds += num_used * seconds
        self._most_used = max(self._most_used, num_used)
        self._started_seconds += len(started) * seconds
        self._waiting_seconds += num_waiting * seconds
        self._bound_seconds[plan.binding_limit] += seconds
        if self._num_iterations % _WASTE_PERIOD == 1:
            self._look_at_slots(started, num_used)
        fill = num_rows / self._config.max_batch_size
        tiers = self._tier_fill() if self._tiers is not None else ()
        self._timeline.add(Moment(now, fill, num_used / self._kv.num_blocks, num_waiting, *tiers))

    def outcome(self, now: float, wall_seconds: float) -> Outcome:
        config, seconds = self._config, max(self._computing_seconds, 1e-12)
        tiers, size = self._tiers, self._kv.tokens_per_block
        return Outcome(
            policy=config.scheduler_config.capacity_scheduler_policy,
            num_blocks=self._kv.num_blocks,
            tokens_per_block=size,
            num_completed=self._num_completed,
            num_refused=self._num_refused,
            first_refusal=self._first_refusal,
            num_iterations=self._num_iterations,
            simulated_seconds=now,
            wall_seconds=wall_seconds,
            num_generated_tokens=len(self._first_tokens) + len(self._gaps),
            num_context_tokens=self._num_context,
            num_reused_tokens=self._num_reused,
            num_pauses=self._num_pauses,
            num_paused_requests=self._num_paused,
            batch_fill=self._row_seconds / seconds / config.max_batch_size,
            token_fill=self._token_seconds / seconds / config.max_num_tokens,
            kv_use=self._block_seconds / seconds / self._kv.num_blocks,
            peak_kv_use=self._most_used / self._kv.num_blocks,
            waste=self._unfilled_slots / max(self._held_slots, 1),
            mean_started=self._started_seconds / seconds,
            mean_waiting=self._waiting_seconds / seconds,
            cache_hit_rate=self._cache.stats().cache_hit_rate,
            tiers=() if tiers is None else tiers.stats(),
            onboarding=None if tiers is None else tiers.onboarding_stats(),
            num_onboarded_tokens={}
            if tiers is None
            else _onboarded(tiers, self._kv.tokens_per_block),
            bound_by={
                _LIMIT_NAMES[limit]: part / seconds for limit, part in self._bound_seconds.items()
            },
            time_to_first_token=Percentiles.of(self._first_tokens),
            inter_token=Percentiles.of(self._gaps),
            latency=Percentiles.of(self._latencies),
            timeline=tuple(self._timeline.moments),
        )

    def _tier_fill(self) -> Iterator[float]:
        """Of host memory and of the disk; 0 for one that is not there."""
        assert self._tiers is not None
        for storage in (self._tiers.cascade.host, self._tiers.cascade.disk):
            usage = None if storage is None else storage.usage
            yield 0.0 if usage is None else usage.used_bytes / usage.max_bytes

    def _look_at_slots(self, started: Sequence[LlmRequest], num_used: int) -> None:
        size = self._kv.tokens_per_block
        held = sum(self._kv.num_table_blocks(llm.request_id) for llm in started)
        self._unfilled_slots += held * size - sum(llm.context_position for llm in started)
        self._held_slots += num_used * size


def _onboarded(tiers: KvTiers, tokens_per_block: int) -> dict[str, int]:
    """Tokens, by tier."""
    bytes_by_tier = {each.tier: each.onboarded_bytes for each in tiers.stats()}
    return {
        tier: num_bytes // tiers.cost.block_bytes * tokens_per_block
        for tier, num_bytes in bytes_by_tier.items()
    }


class _Timeline:
    """At most ``_MOST_MOMENTS`` moments, evenly many iterations apart."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._period = 1
        self._num_seen = 0

    def add(self, moment: Moment) -> None:
        if self._num_seen % self._period == 0:
            self.moments.append(moment)
            if len(self.moments) > _MOST_MOMENTS:
                self.moments = self.moments[::2]
                self._period *= 2
        self._num_seen += 1
