"""``inflight simulate``: a trace under the capacity policies, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inflight.api.config import InflightConfig
from inflight.cli.option_groups import CostOptions, MemoryOptions
from inflight.cli.sizing import (
    calibration,
    executor_limits,
    model_shape,
    policies,
    pool_blocks,
    tier_speeds,
)
from inflight.engine.pools import layer_groups
from inflight.errors import ConfigError
from inflight.simulator.calibration_file import Calibration
from inflight.simulator.comparison import compare_policies, comparison_json, comparison_lines
from inflight.simulator.example import (
    EXAMPLE_BLOCKS,
    EXAMPLE_COST,
    EXAMPLE_MAX_SEQ_LEN,
    example_trace,
)
from inflight.simulator.picture import check_can_draw, draw
from inflight.simulator.trace import TraceRequest
from inflight.simulator.trace_file import load_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    trace: Path | None
    example: bool
    """The built-in trace in place of a file."""
    num_requests: int | None
    """Only the first of the file; None: all."""
    speed: float
    """Arrivals come so many times as fast."""
    num_blocks: int | None
    """Of the KV pool; None: from ``memory`` and the configuration."""
    memory: MemoryOptions
    cost: CostOptions
    png: Path | None
    as_json: bool


def simulate(config: InflightConfig, options: SimulateOptions, say: Callable[[str], None]) -> None:
    """Prints the comparison, or its JSON. ``say``: for what is not the result.

    Raises ConfigError, TraceError.
    """
    if options.png is not None:
        check_can_draw()
    trace = _trace(options)
    if options.example and not config.max_seq_len:
        config = config.model_copy(update={"max_seq_len": EXAMPLE_MAX_SEQ_LEN})
    model = model_shape(config)
    limits = executor_limits(config, model)
    num_blocks = options.num_blocks
    if num_blocks is None and options.example and options.memory.memory_gib is None:
        num_blocks = EXAMPLE_BLOCKS
    num_blocks = num_blocks or pool_blocks(limits, model, options.memory)
    if options.example and options.cost == CostOptions():
        measured = Calibration(EXAMPLE_COST)
    else:
        measured = calibration(options.cost, config, model, say)
    outcomes = compare_policies(
        trace,
        limits,
        measured.cost,
        num_blocks=num_blocks,
        groups=layer_groups(model, limits),
        tier_speeds=tier_speeds(options.memory, model, measured),
        policies=policies(config),
    )
    if options.png is not None:
        draw(outcomes, options.png)
    if options.as_json:
        facts = {"num_requests": len(trace), "num_blocks": num_blocks}
        print(json.dumps({**facts, **comparison_json(outcomes)}, indent=1))
        return
    print(
        f"{len(trace)} requests; {num_blocks} KV blocks of "
        f"{limits.kv_cache_config.tokens_per_block} tokens, max_batch_size "
        f"{limits.max_batch_size}, max_num_tokens {limits.max_num_tokens}"
    )
    for line in comparison_lines(outcomes):
        print(line)


def _trace(options: SimulateOptions) -> list[TraceRequest]:
    if options.example == (options.trace is not None):
        raise ConfigError("simulate: name a trace file, or ask for --example")
    if options.trace is None:
        trace = example_trace()[: options.num_requests]
    else:
        trace = load_trace(options.trace, max_requests=options.num_requests)
    return [request._replace(arrival=request.arrival / options.speed) for request in trace]
