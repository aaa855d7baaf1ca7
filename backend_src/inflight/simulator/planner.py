"""The search behind ``inflight plan``: arithmetic first, then short simulations of candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.api import CapacitySchedulerPolicy, ExecutorConfig
from inflight.engine.memory import num_fitting
from inflight.engine.pools import PoolDivision, layer_groups
from inflight.errors import ConfigError
from inflight.simulator.arrivals import Arrivals, ClosedArrivals, OpenArrivals
from inflight.simulator.comparison import POLICIES, with_policy
from inflight.simulator.cost_model import CostModel
from inflight.simulator.model_shape import ModelShape
from inflight.simulator.outcome import Outcome
from inflight.simulator.simulation import Simulation
from inflight.simulator.tiers import TierSpeeds
from inflight.simulator.trace import TraceRequest
from inflight.simulator.traffic import Traffic

LARGEST_FRACTION = 0.9
"""Of the memory that is free after the weights, where none is configured; the rest is for
activations and the process."""

HEADROOM = 1.25
"""Recommended KV memory over the most that a simulation has held."""

BLOCK_SIZES = (32, 16, 64, 128)
"""What the native kernels take; the first is preferred where nothing speaks against it."""

NUM_REQUESTS, SEED = 240, 1
MOST_ROWS = 512
MORE_SPEED, LESS_WAIT = 1.02, 0.9
"""A candidate is better with so many times the tokens a second, or, at the same speed, with so
many times the p99 time to first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    model: ModelShape
    free_bytes: int
    """Memory that is left after the weights and the tier in host memory."""
    limits: ExecutorConfig
    """What is configured; the search starts from it, and keeps to its ``max_tokens`` and
    ``free_memory_fraction`` where it has any."""
    cost: CostModel
    traffic: Traffic
    concurrency: int | None
    """Clients that each wait for their answer; None: requests come at the traffic's own rate."""
    tier_speeds: TierSpeeds | None = None
    """Needed where ``limits`` has KV tiers."""
    policies: Sequence[CapacitySchedulerPolicy] = POLICIES
    """What is tried, as ``block_sizes``; of either, the first stays where nothing is better."""
    block_sizes: Sequence[int] = BLOCK_SIZES

    @property
    def largest_fraction(self) -> float:
        """Of the free memory, for the KV cache."""
        return self.limits.kv_cache_config.free_memory_fraction or LARGEST_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """By arithmetic alone, at ``Question.largest_fraction`` of the free memory."""

    tokens_per_block: int
    num_blocks: int
    """Of the first pool, where layers have sliding windows; the others lie beside it."""
    typical_tokens: int
    """Mean prompt + mean output."""
    fit_typical: int
    """Requests of typical length at their end; a shared prefix is held once."""
    longest_tokens: int
    fit_longest: int
    binds_first: str
    """``max_batch_size`` or ``kv_cache``, as more and more typical requests come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration and what its simulation has seen."""

    limits: ExecutorConfig
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    question: Question
    capacity: Capacity
    """With the recommended block size and rows."""
    candidates: Sequence[Candidate]
    """All that were simulated."""
    best: Candidate
    memory_fraction: float
    """Recommended kv_cache_free_gpu_mem_fraction."""
    most_requests_per_second: float
    """What the best candidate serves when there is always somebody waiting."""

    @property
    def is_overloaded(self) -> bool:
        """Requests come faster than they can be served."""
        question = self.question
        if question.concurrency is not None:
            return False
        return question.traffic.requests_per_second > self.most_requests_per_second


def make_plan(question: Question) -> Plan:
    """Raises ConfigError where the memory does not hold one longest request, or where the limits
    refuse every request."""
    num_requests = max(NUM_REQUESTS, 2 * (question.concurrency or 0))
    trace = question.traffic.trace(num_requests, seed=SEED, max_seq_len=question.limits.max_seq_len)
    widest = _enough_rows(question, trace)
    candidates = [*widest]
    incumbent = widest[-1]
    for policy in question.policies:
        for size in question.block_sizes:
            limits = _with_block_size(with_policy(widest[-1].limits, policy), size)
            if limits == widest[-1].limits:
                continue
            challenger = _simulate(question, limits, trace)
            candidates.append(challenger)
            if is_better(challenger.outcome, incumbent.outcome):
                incumbent = challenger
    return Plan(
        question=question,
        capacity=capacity(question, incumbent.limits),
        candidates=candidates,
        best=incumbent,
        memory_fraction=_enough_memory(question, incumbent, trace),
        most_requests_per_second=_most_requests_per_second(question, incumbent, trace),
    )


def is_better(challenger: Outcome, incumbent: Outcome) -> bool:
    """Clearly faster, or as fast with clearly less wait for the first token."""
    speed = challenger.tokens_per_second / incumbent.tokens_per_second
    if speed >= MORE_SPEED:
        return True
    wait = challenger.time_to_first_token.p99 / incumbent.time_to_first_token.p99
    return speed > 1 / MORE_SPEED and wait <= LESS_WAIT


def capacity(question: Question, limits: ExecutorConfig) -> Capacity:
    """How many requests fit. Raises ConfigError where not even the longest request does."""
    size, traffic = limits.kv_cache_config.tokens_per_block, question.traffic
    num_blocks = _num_blocks(question, limits, question.largest_fraction)
    pools = _division(question, limits).pools(num_blocks)
    longest = limits.max_seq_len
    if num_blocks < 2 or num_fitting(pools, longest, size) < 1:
        raise ConfigError(
            f"--memory: after the weights there is room for {num_blocks * size} tokens of KV, "
            f"fewer than one request of max_seq_len {longest} may have"
        )
    typical = min(longest, round(traffic.input_lengths.mean + traffic.output_lengths.mean))
    fit_typical = num_fitting(pools, typical, size)
    if limits.kv_cache_config.enable_block_reuse and pools[0].window is None:
        shared = min(traffic.shared_prefix, typical - 1) // size
        own = -(-typical // size) - shared
        # A shared prefix saves nothing in a pool with a window, which passes it.
        fit_shared = max(0, num_blocks - shared * traffic.num_groups) // own
        fit_typical = min([fit_shared, *(num_fitting([p], typical, size) for p in pools[1:])])
    return Capacity(
        tokens_per_block=size,
        num_blocks=num_blocks,
        typical_tokens=typical,
        fit_typical=fit_typical,
        longest_tokens=longest,
        fit_longest=num_fitting(pools, longest, size),
        binds_first="max_batch_size" if fit_typical >= limits.max_batch_size else "kv_cache",
    )


def _division(question: Question, limits: ExecutorConfig) -> PoolDivision:
    """As the engine divides memory between pools, where layers have sliding windows."""
    return PoolDivision(limits, layer_groups(question.model, limits))


def _enough_rows(question: Question, trace: Sequence[TraceRequest]) -> list[Candidate]:
    """Twice as many rows, again and again, as long as rows bind and more of them help."""
    limits = with_policy(question.limits, question.policies[0])
    limits = _with_block_size(limits, question.block_sizes[0])
    found = [_simulate(question, limits, trace)]
    while found[-1].outcome.bound_by["max_batch_size"] > 0.1:
        rows = 2 * limits.max_batch_size
        least = rows + max(question.block_sizes)
        if rows > min(MOST_ROWS, capacity(question, limits).fit_typical):
            break
        limits = replace(
            limits,
            max_batch_size=rows,
            max_num_tokens=max(limits.max_num_tokens, _power_of_two(least)),
        )
        wider = _simulate(question, limits, trace)
        if not is_better(wider.outcome, found[-1].outcome):
            return [wider, *found]  # the last one is the one to go on with
        found.append(wider)
    return found


def _simulate(
    question: Question,
    limits: ExecutorConfig,
    trace: Sequence[TraceRequest],
    fraction: float | None = None,
) -> Candidate:
    """``fraction``: of the free memory; None: the largest."""
    size = limits.kv_cache_config.tokens_per_block
    num_blocks = _num_blocks(question, limits, fraction or question.largest_fraction)
    # More than all of its requests could hold changes nothing and takes time to make.
    most = sum(-(-(each.input_length + each.output_length) // size) for each in trace)
    simulation = Simulation(
        limits,
        question.cost,
        num_blocks=min(num_blocks, most),
        groups=layer_groups(question.model, limits),
        tier_speeds=question.tier_speeds,
    )
    arrivals: Arrivals = OpenArrivals(trace)
    if question.concurrency is not None:
        arrivals = ClosedArrivals(trace, question.concurrency)
    outcome = simulation.run(arrivals)
    if not outcome.num_completed:
        raise ConfigError(f"every request would be refused: {outcome.first_refusal}")
    return Candidate(limits=limits, outcome=outcome)


def _num_blocks(question: Question, limits: ExecutorConfig, fraction: float) -> int:
    """Of the first pool."""
    fitting = _division(question, limits).fitting(int(question.free_bytes * fraction))
    kv = limits.kv_cache_config
    return fitting if kv.max_tokens is None else min(fitting, kv.max_tokens // kv.tokens_per_block)


def _enough_memory(question: Question, best: Candidate, trace: Sequence[TraceRequest]) -> float:
    """The smallest fraction, in steps of 0.05, with which a simulation is not clearly worse; or the
    one that is configured.

    It begins at what was held, with headroom: policies promise blocks beyond those that are held,
    which only a simulation shows.
    """
    configured = question.limits.kv_cache_config.free_memory_fraction
    if configured is not None:
        return configured
    outcome = best.outcome
    per_token = _division(question, best.limits).bytes_per_token
    per_block = outcome.tokens_per_block * per_token
    held = outcome.peak_kv_use * outcome.num_blocks * per_block
    longest = best.limits.max_seq_len * per_token + per_block
    step = math.ceil(20 * max(HEADROOM * held, longest) / question.free_bytes)
    while step / 20 < LARGEST_FRACTION:
        smaller = _simulate(question, best.limits, trace, step / 20)
        if not is_better(outcome, smaller.outcome):
            return step / 20
        step += 1
    return LARGEST_FRACTION


def _most_requests_per_second(
    question: Question, best: Candidate, trace: Sequence[TraceRequest]
) -> float:
    """With all requests there at once. Clients that wait for their answers set the rate."""
    outcome = best.outcome
    if question.concurrency is None:
        at_once = [each._replace(arrival=0.0) for each in trace]
        outcome = _simulate(question, best.limits, at_once).outcome
    return outcome.num_completed / outcome.simulated_seconds


def _with_block_size(limits: ExecutorConfig, size: int) -> ExecutorConfig:
    kv = replace(limits.kv_cache_config, tokens_per_block=size)
    tokens = max(limits.max_num_tokens, limits.max_batch_size + size)
    return replace(limits, kv_cache_config=kv, max_num_tokens=tokens)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
