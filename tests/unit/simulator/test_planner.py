"""``make_plan``: its arithmetic by hand, and that what it recommends follows from what it saw."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from inflight.api import CapacitySchedulerPolicy, ExecutorConfig
from inflight.errors import ConfigError
from inflight.simulator import ModelShape, planner
from inflight.simulator.advice import advice_lines, config_values, plan_json, reasons
from inflight.simulator.example import EXAMPLE_COST
from inflight.simulator.outcome import Outcome, Percentiles
from inflight.simulator.planner import Plan, Question, capacity, is_better, make_plan
from inflight.simulator.traffic import Lengths, Traffic

KV_BYTES = 1000
MODEL = ModelShape(
    num_layers=2,
    attention_channels=16,
    num_weights=1_000_000,
    num_active_weights=1_000_000,
    bytes_per_weight=2.0,
    kv_bytes_per_token=KV_BYTES,
    max_position_embeddings=1024,
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "NUM_REQUESTS", 24)


def ask(pool_tokens: int, rate: float = math.inf, **changes: Any) -> Question:
    """``pool_tokens``: what LARGEST_FRACTION of the free memory holds."""
    traffic = Traffic(
        input_lengths=Lengths.parse("", "100"),
        output_lengths=Lengths.parse("", "60"),
        requests_per_second=rate,
    )
    question = Question(
        model=MODEL,
        free_bytes=math.ceil(pool_tokens * KV_BYTES / 0.9) + 1,
        limits=ExecutorConfig(max_batch_size=8, max_num_tokens=128, max_seq_len=512),
        cost=EXAMPLE_COST,
        traffic=traffic,
        concurrency=None,
    )
    return replace(question, **changes)


def test_what_fits_by_hand() -> None:
    """160 tokens are 5 blocks of 32, 512 are 16; there are 100 blocks."""
    question = ask(3200)
    fits = capacity(question, question.limits)
    assert (fits.num_blocks, fits.typical_tokens) == (100, 160)
    assert (fits.fit_typical, fits.fit_longest) == (20, 6)
    assert fits.binds_first == "max_batch_size"
    wide = replace(question.limits, max_batch_size=21)
    assert capacity(question, wide).binds_first == "kv_cache"


def test_a_shared_prefix_is_held_once_a_group() -> None:
    """70 shared tokens are 2 whole blocks: 4 held by two groups, and 3 more a request."""
    traffic = replace(ask(3200).traffic, shared_prefix=70, num_groups=2)
    question = ask(3200, traffic=traffic)
    assert capacity(question, question.limits).fit_typical == (100 - 4) // 3


def test_memory_for_less_than_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="--memory: .* room for 480 tokens .* max_seq_len 512"):
        make_plan(ask(511))


def test_limits_that_refuse_everything_are_refused() -> None:
    limits = ExecutorConfig(
        max_batch_size=8, max_num_tokens=50, max_seq_len=512, enable_chunked_context=False
    )
    with pytest.raises(ConfigError, match="every request would be refused: input_ids"):
        make_plan(ask(3200, limits=limits))


def simulated(made: Plan) -> set[tuple[str, int]]:
    return {(c.outcome.policy.value, c.outcome.tokens_per_block) for c in made.candidates}


def test_light_traffic_gets_the_defaults_and_little_memory() -> None:
    made = make_plan(ask(20_000, rate=0.2))
    assert len(simulated(made)) == 8
    assert config_values(made) == {
        "batch_scheduler_policy": "guaranteed_no_evict",
        "max_batch_size": 8,
        "max_num_tokens": 128,
        "max_seq_len": 512,
        "tokens_per_block": 32,
        "kv_cache_free_gpu_mem_fraction": 0.05,
    }
    assert made.most_requests_per_second > 0.2 and not made.is_overloaded


def test_a_small_pool_gets_max_utilization_all_memory_and_a_warning() -> None:
    """Long outputs that rarely come at once: promises to completion leave blocks empty."""
    traffic = Traffic(
        input_lengths=Lengths.parse("", "30"),
        output_lengths=Lengths.parse("", "p50=150,p95=400"),
        requests_per_second=5.0,
    )
    made = make_plan(ask(1600, traffic=traffic))
    best = made.best.outcome
    assert best.policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    assert made.memory_fraction == 0.9
    assert made.most_requests_per_second < 5.0 and made.is_overloaded
    assert "the rate is more than this machine serves" in reasons(made)[-1]
    rivals = [c.outcome for c in made.candidates if c.outcome.policy is not best.policy]
    assert all(is_better(best, rival) for rival in rivals)


def test_more_rows_where_rows_bind_and_help() -> None:
    made = make_plan(ask(20_000, concurrency=64))
    rows = made.best.limits.max_batch_size
    assert rows in (16, 32, 64)
    assert made.best.limits.max_num_tokens >= rows + made.best.outcome.tokens_per_block
    first = made.candidates[0].outcome
    assert made.best.outcome.tokens_per_second > first.tokens_per_second


def test_the_recommended_memory_was_simulated_and_is_enough() -> None:
    made = make_plan(ask(20_000, rate=3.0))
    assert 0.05 <= made.memory_fraction < 0.9
    trace = made.question.traffic.trace(24, seed=planner.SEED, max_seq_len=512)
    smaller = planner._simulate(made.question, made.best.limits, trace, made.memory_fraction)
    assert not is_better(made.best.outcome, smaller.outcome)


def test_better_is_clearly_faster_or_clearly_sooner() -> None:
    outcome = make_plan(ask(20_000, rate=0.2)).best.outcome

    def like(speed: float, wait: float) -> Outcome:
        return replace(
            outcome,
            simulated_seconds=outcome.simulated_seconds / speed,
            time_to_first_token=Percentiles(wait, wait, wait),
        )

    base = like(1.0, 1.0)
    assert is_better(like(1.03, 5.0), base)
    assert is_better(like(0.99, 0.8), base)
    assert not is_better(like(1.01, 0.95), base)
    assert not is_better(like(0.97, 0.1), base)


def test_the_words_and_the_json_say_the_same() -> None:
    made = make_plan(ask(3200, rate=1.0))
    text, facts = "\n".join(advice_lines(made)), plan_json(made)
    for key, value in facts["configuration"].items():
        assert f"  {key}: {value}\n" in text + "\n"
    assert all(f"- {reason}" in text for reason in facts["reasons"])
    assert facts["capacity"]["fit_typical"] == 20
    assert len(facts["candidates"]) == len(made.candidates)
    assert text.count("\n* ") == 1
