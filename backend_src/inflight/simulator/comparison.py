"""One trace under several policies, side by side: as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from inflight.api import CapacitySchedulerPolicy, ExecutorConfig, KvTiersConfig
from inflight.api.kv_pools import ALL_LAYERS, KvGroup
from inflight.simulator.arrivals import OpenArrivals
from inflight.simulator.cost_model import CostModel
from inflight.simulator.outcome import Outcome
from inflight.simulator.simulation import Simulation
from inflight.simulator.tiers import TierSpeeds
from inflight.simulator.trace import TraceRequest

POLICIES = (
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    CapacitySchedulerPolicy.MAX_UTILIZATION,
)


def with_policy(config: ExecutorConfig, policy: CapacitySchedulerPolicy) -> ExecutorConfig:
    """``config`` with another capacity policy."""
    scheduler = replace(config.scheduler_config, capacity_scheduler_policy=policy)
    return replace(config, scheduler_config=scheduler)


def compare_policies(
    trace: Sequence[TraceRequest],
    config: ExecutorConfig,
    cost: CostModel,
    *,
    num_blocks: int,
    groups: Sequence[KvGroup] = (ALL_LAYERS,),
    tier_speeds: TierSpeeds | None = None,
    policies: Sequence[CapacitySchedulerPolicy] = POLICIES,
) -> list[Outcome]:
    """The outcome of each of ``policies``; without KV tiers and then, where there are
    any, with them.

    ``trace`` is in order of arrival; ``groups``, ``tier_speeds``: see Simulation.
    """
    kv = config.kv_cache_config
    configs = [replace(config, kv_cache_config=replace(kv, tiers=KvTiersConfig()))]
    if kv.tiers.exist:
        configs.append(config)
    return [
        Simulation(
            with_policy(each, policy),
            cost,
            num_blocks=num_blocks,
            groups=groups,
            tier_speeds=tier_speeds,
        ).run(OpenArrivals(trace))
        for policy in policies
        for each in configs
    ]


def iterations_per_minute(outcomes: Sequence[Outcome]) -> float:
    """Simulated iterations a minute of real time, over all outcomes."""
    seconds = sum(outcome.wall_seconds for outcome in outcomes)
    return 60 * sum(outcome.num_iterations for outcome in outcomes) / max(seconds, 1e-12)


def comparison_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``iterations_per_minute``, and each outcome under the name of its policy: as configured, and
    where that has KV tiers, under ``without_tiers`` without them."""
    has_tiers = any(outcome.tiers for outcome in outcomes)
    facts: dict[str, Any] = {
        "iterations_per_minute": iterations_per_minute(outcomes),
        "policies": _by_policy(o for o in outcomes if bool(o.tiers) == has_tiers),
    }
    if has_tiers:
        facts["without_tiers"] = _by_policy(o for o in outcomes if not o.tiers)
    return facts


def comparison_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table with a column for each outcome."""
    yield f"{'':32}" + "".join(f"{outcome.policy.value:>24}" for outcome in outcomes)
    has_tiers = any(outcome.tiers for outcome in outcomes)
    for name, cell in (*_ROWS, *(_TIER_ROWS if has_tiers else ())):
        yield f"{name:32}" + "".join(f"{cell(outcome):>24}" for outcome in outcomes)
    first = outcomes[0]
    if first.num_refused:
        yield f"{first.num_refused} requests were refused; the first: {first.first_refusal}"
    yield (
        f"{sum(outcome.num_iterations for outcome in outcomes)} iterations in "
        f"{sum(outcome.wall_seconds for outcome in outcomes):.1f} s: "
        f"{iterations_per_minute(outcomes):,.0f} a minute"
    )


def _by_policy(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    return {outcome.policy.value: outcome.to_json() for outcome in outcomes}


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _limit(bound_by: dict[str, float]) -> str:
    """The limit that kept work waiting longest."""
    limits = {name: share for name, share in bound_by.items() if name != "nothing"}
    name = max(limits, key=lambda each: limits[each])
    return f"{name} {limits[name]:.0%}" if limits[name] > 0 else "nothing"


def _count(outcome: Outcome, name: str) -> str:
    """Of the decisions about blocks in the tiers."""
    return str(getattr(outcome.onboarding, name)) if outcome.onboarding else "0"


_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("requests completed", lambda o: str(o.num_completed)),
    ("simulated time", lambda o: _seconds(o.simulated_seconds)),
    ("generated tokens/s", lambda o: f"{o.tokens_per_second:.1f}"),
    ("iterations", lambda o: str(o.num_iterations)),
    ("batch fill (rows)", lambda o: f"{o.batch_fill:.1%}"),
    ("token budget fill", lambda o: f"{o.token_fill:.1%}"),
    ("KV blocks in use", lambda o: f"{o.kv_use:.1%}"),
    ("waste (empty slots held)", lambda o: f"{o.waste:.1%}"),
    ("requests started, waiting", lambda o: f"{o.mean_started:.1f}, {o.mean_waiting:.1f}"),
    ("limit that binds most", lambda o: _limit(o.bound_by)),
    ("pauses (requests)", lambda o: f"{o.num_pauses} ({o.num_paused_requests})"),
    ("context tokens computed", lambda o: str(o.num_context_tokens)),
    ("context tokens reused", lambda o: str(o.num_reused_tokens)),
    ("hit rate (blocks)", lambda o: f"{o.cache_hit_rate:.1%}"),
    ("first token p50", lambda o: _seconds(o.time_to_first_token.p50)),
    ("first token p90", lambda o: _seconds(o.time_to_first_token.p90)),
    ("first token p99", lambda o: _seconds(o.time_to_first_token.p99)),
    ("between tokens p50", lambda o: _seconds(o.inter_token.p50)),
    ("between tokens p90", lambda o: _seconds(o.inter_token.p90)),
    ("between tokens p99", lambda o: _seconds(o.inter_token.p99)),
    ("whole answer p50", lambda o: _seconds(o.latency.p50)),
    ("whole answer p99", lambda o: _seconds(o.latency.p99)),
)

_TIER_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("KV tiers", lambda o: "with" if o.tiers else "without"),
    ("tokens back from host memory", lambda o: str(o.num_onboarded_tokens.get("host", 0))),
    ("tokens back from disk", lambda o: str(o.num_onboarded_tokens.get("disk", 0))),
    ("times that computing was faster", lambda o: _count(o, "recompute_decisions")),
    ("waits for the disk in vain", lambda o: _count(o, "late_loads")),
    ("blocks that the disk lost", lambda o: str(sum(t.dropped_blocks for t in o.tiers))),
)
