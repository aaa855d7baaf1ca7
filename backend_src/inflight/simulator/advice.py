"""A Plan in words, as configuration lines, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inflight.api import CapacitySchedulerPolicy
from inflight.simulator.outcome import Outcome
from inflight.simulator.planner import LARGEST_FRACTION, Candidate, Plan

_MIB = 1 << 20


def config_values(plan: Plan) -> dict[str, str | int | float]:
    """The recommended configuration keys."""
    limits = plan.best.limits
    max_tokens = limits.kv_cache_config.max_tokens
    values: dict[str, str | int | float] = {
        "batch_scheduler_policy": limits.scheduler_config.capacity_scheduler_policy.value,
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "max_seq_len": limits.max_seq_len,
        "tokens_per_block": limits.kv_cache_config.tokens_per_block,
        "kv_cache_free_gpu_mem_fraction": plan.memory_fraction,
    }
    if max_tokens is not None:
        values["max_tokens_in_paged_kv_cache"] = max_tokens
    return values


def advice_lines(plan: Plan) -> Iterator[str]:
    """What fits, what is recommended, why, and the lines to paste."""
    yield from _capacity_lines(plan)
    yield ""
    yield "simulated (* is recommended):"
    yield f"  {'policy':20}{'block':>6}{'rows':>6}{'tokens/s':>10}{'first token p50, p99':>24}" + (
        f"{'between p99':>13}{'pauses':>8}"
    )
    for candidate in plan.candidates:
        yield _candidate_line(candidate, is_best=candidate is plan.best)
    yield ""
    for reason in reasons(plan):
        yield f"- {reason}"
    yield ""
    yield "configuration:"
    for key, value in config_values(plan).items():
        yield f"  {key}: {value}"


def reasons(plan: Plan) -> list[str]:
    """Why the recommendation is what it is, a sentence each."""
    return [
        _policy_reason(plan),
        _block_reason(plan),
        _rows_reason(plan),
        _memory_reason(plan),
        _rate_reason(plan),
        *_tier_reason(plan),
        *_warnings(plan),
    ]


def plan_json(plan: Plan) -> dict[str, Any]:
    """All of it for machines."""
    capacity, model = plan.capacity, plan.question.model
    return {
        "configuration": config_values(plan),
        "reasons": reasons(plan),
        "is_overloaded": plan.is_overloaded,
        "most_requests_per_second": plan.most_requests_per_second,
        "model": {
            "num_weights": model.num_weights,
            "weight_bytes": model.weight_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
        },
        "capacity": {
            "tokens_per_block": capacity.tokens_per_block,
            "num_blocks": capacity.num_blocks,
            "typical_tokens": capacity.typical_tokens,
            "fit_typical": capacity.fit_typical,
            "longest_tokens": capacity.longest_tokens,
            "fit_longest": capacity.fit_longest,
            "binds_first": capacity.binds_first,
        },
        "candidates": [
            {"max_batch_size": each.limits.max_batch_size, **each.outcome.to_json()}
            for each in plan.candidates
        ],
    }


def _capacity_lines(plan: Plan) -> Iterator[str]:
    capacity, question = plan.capacity, plan.question
    tokens = capacity.num_blocks * capacity.tokens_per_block
    has_bound = question.limits.kv_cache_config.max_tokens is not None
    capped = ", within max_tokens_in_paged_kv_cache," if has_bound else ""
    yield (
        f"model: {question.model.num_weights / 1e6:.0f} M weights in "
        f"{question.model.weight_bytes / _MIB:.0f} MiB, "
        f"{question.model.kv_bytes_per_token} bytes of KV a token"
    )
    yield (
        f"memory: {question.free_bytes / _MIB:.0f} MiB free after the weights; "
        f"{question.largest_fraction:.0%} of it{capped} hold {tokens} tokens in "
        f"{capacity.num_blocks} blocks of {capacity.tokens_per_block}"
    )
    yield (
        f"fits: {capacity.fit_typical} requests of typical length ({capacity.typical_tokens} "
        f"tokens), {capacity.fit_longest} of maximal length ({capacity.longest_tokens})"
    )
    yield f"as typical requests come, {capacity.binds_first} binds first"


def _candidate_line(candidate: Candidate, *, is_best: bool) -> str:
    outcome = candidate.outcome
    first = f"{_time(outcome.time_to_first_token.p50)}, {_time(outcome.time_to_first_token.p99)}"
    return (
        f"{'*' if is_best else ' '} {outcome.policy.value:20}{outcome.tokens_per_block:6}"
        f"{candidate.limits.max_batch_size:6}{outcome.tokens_per_second:10.1f}{first:>24}"
        f"{_time(outcome.inter_token.p99):>13}{outcome.num_pauses:8}"
    )


def _policy_reason(plan: Plan) -> str:
    best = plan.best.outcome
    if len(plan.question.policies) == 1:
        return f"{best.policy.value}: as configured; no other was tried"
    others = [
        each.outcome
        for each in plan.candidates
        if each.outcome.policy is not best.policy
        and each.outcome.tokens_per_block == best.tokens_per_block
        and each.limits.max_batch_size == plan.best.limits.max_batch_size
    ]
    other = others[0]
    compared = (
        f"{_ratio(best, other)} the tokens/s of {other.policy.value}, first token p99 "
        f"{_time(best.time_to_first_token.p99)} against {_time(other.time_to_first_token.p99)}"
    )
    if best.policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return (
            f"max_utilization: {compared}, for {best.num_pauses} pauses of "
            f"{best.num_paused_requests} in {best.num_completed} requests"
        )
    return f"guaranteed_no_evict: {compared}; it never pauses, so nothing is computed twice"


def _block_reason(plan: Plan) -> str:
    best, (usual, *others) = plan.best.outcome, plan.question.block_sizes
    is_usual = best.tokens_per_block == usual
    compared = "no other size was clearly better" if is_usual else f"clearly better than {usual}"
    if not others:
        compared = "as configured; no other was tried"
    return (
        f"tokens_per_block {best.tokens_per_block}: {best.waste:.1%} of the held slots are empty, "
        f"{best.num_reused_tokens} context tokens were reused; {compared}"
    )


def _rows_reason(plan: Plan) -> str:
    outcome, rows = plan.best.outcome, plan.best.limits.max_batch_size
    return (
        f"max_batch_size {rows}: {outcome.mean_started:.1f} requests ran at once on average; rows "
        f"kept requests waiting {outcome.bound_by['max_batch_size']:.0%} of the time, KV blocks "
        f"{outcome.bound_by['kv_cache']:.0%}, the token budget "
        f"{outcome.bound_by['max_num_tokens']:.0%}"
    )


def _memory_reason(plan: Plan) -> str:
    outcome = plan.best.outcome
    held = outcome.peak_kv_use * outcome.num_blocks * outcome.tokens_per_block
    size = held * plan.question.model.kv_bytes_per_token / _MIB
    key = f"kv_cache_free_gpu_mem_fraction {plan.memory_fraction}"
    if plan.question.limits.kv_cache_config.free_memory_fraction is not None:
        return f"{key}: as configured; at most {size:.0f} MiB were held"
    if plan.memory_fraction == LARGEST_FRACTION:
        return f"{key}: at most {size:.0f} MiB were held, and less memory would cost speed or waits"
    return (
        f"{key}: at most {size:.0f} MiB were held, and more memory made nothing clearly better; "
        f"it would keep more prefixes for later"
    )


def _rate_reason(plan: Plan) -> str:
    most = f"{plan.most_requests_per_second:.2f} requests/s"
    if plan.question.concurrency is not None:
        return f"{plan.question.concurrency} clients that wait for their answers get {most}"
    rate = plan.question.traffic.requests_per_second
    return f"rate {rate:g}: at most about {most} can be served"


def _tier_reason(plan: Plan) -> Iterator[str]:
    outcome = plan.best.outcome
    if outcome.tiers:
        tokens = outcome.num_onboarded_tokens
        yield (
            f"KV tiers: {tokens.get('host', 0)} tokens came back from host memory and "
            f"{tokens.get('disk', 0)} from disk, of {outcome.num_reused_tokens} reused and "
            f"{outcome.num_context_tokens} computed; hit rate {outcome.cache_hit_rate:.1%}"
        )


def _warnings(plan: Plan) -> Iterator[str]:
    traffic, longest = plan.question.traffic, plan.best.limits.max_seq_len
    if traffic.input_lengths.p95 + traffic.output_lengths.p95 > longest:
        yield f"long requests were cut to max_seq_len {longest}: raise it if the model allows"
    if plan.is_overloaded:
        yield "the rate is more than this machine serves: waits grow without end"


def _ratio(outcome: Outcome, other: Outcome) -> str:
    return f"{outcome.tokens_per_second / other.tokens_per_second:.2f} times"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
