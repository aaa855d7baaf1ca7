"""``inflight plan``: what to configure for a model, a memory size and a traffic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from inflight.api.config import InflightConfig
from inflight.cli.option_groups import CostOptions, MemoryOptions
from inflight.cli.sizing import (
    block_sizes,
    calibration,
    executor_limits,
    free_after_weights,
    model_shape,
    policies,
    tier_speeds,
)
from inflight.errors import ConfigError
from inflight.simulator.advice import advice_lines, plan_json
from inflight.simulator.planner import Question, make_plan
from inflight.simulator.traffic import Lengths, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    input_lengths: str
    output_lengths: str
    requests_per_second: float | None
    """Either this or ``concurrency``."""
    concurrency: int | None
    shared_prefix: int
    num_groups: int
    memory: MemoryOptions
    cost: CostOptions
    as_json: bool


def plan(config: InflightConfig, options: PlanOptions, say: Callable[[str], None]) -> None:
    """Prints the recommendation, or its JSON. ``say``: for what is not the result.

    Raises ConfigError.
    """
    if (options.requests_per_second is None) == (options.concurrency is None):
        raise ConfigError("plan: give either --rate or --concurrency")
    traffic = Traffic(
        input_lengths=Lengths.parse("--input-lengths", options.input_lengths),
        output_lengths=Lengths.parse("--output-lengths", options.output_lengths),
        requests_per_second=options.requests_per_second or math.inf,
        shared_prefix=options.shared_prefix,
        num_groups=options.num_groups,
    )
    model = model_shape(config)
    limits = executor_limits(config, model)
    measured = calibration(options.cost, config, model, say)
    question = Question(
        model=model,
        free_bytes=free_after_weights(model, limits, options.memory),
        limits=limits,
        cost=measured.cost,
        traffic=traffic,
        concurrency=options.concurrency,
        tier_speeds=tier_speeds(options.memory, model, measured),
        policies=policies(config),
        block_sizes=block_sizes(config),
    )
    made = make_plan(question)
    if options.as_json:
        print(json.dumps(plan_json(made), indent=1))
        return
    for line in advice_lines(made):
        print(line)
