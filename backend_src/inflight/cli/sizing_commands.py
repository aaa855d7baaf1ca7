"""The commands ``simulate`` and ``plan`` as a user types them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inflight.cli.config_options import resolved_config, with_config_options
from inflight.cli.option_groups import CostOptions, MemoryOptions, with_option_groups
from inflight.cli.serve import tell

# What the commands import would make every other command slower: it is imported where it is called.

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of configuration keys.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


@with_config_options
@with_option_groups(memory=MemoryOptions, cost=CostOptions)
def simulate(
    *,
    trace: Annotated[
        Path | None,
        typer.Argument(help="CSV or JSON lines: our columns, Mooncake's or Azure's."),
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="The built-in trace.")] = False,
    requests: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Only so many, from the beginning.")
    ] = None,
    speed: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Arrivals so many times as fast.")
    ] = 1.0,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 22, help="Exact size of the KV pool.", rich_help_panel="KV pool"
        ),
    ] = None,
    memory: MemoryOptions,
    cost: CostOptions,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
    as_json: AsJson = False,
    config_file: ConfigFile = None,
    config_values: dict[str, str],
) -> None:
    """Replay a trace under both capacity policies, or the one that is configured, without a model:
    what would it be like?"""
    from inflight.cli.simulate import SimulateOptions
    from inflight.cli.simulate import simulate as run

    options = SimulateOptions(
        trace=trace,
        example=example,
        num_requests=requests,
        speed=speed,
        num_blocks=num_blocks,
        memory=memory,
        cost=cost,
        png=png,
        as_json=as_json,
    )
    run(resolved_config(config_values, config_file), options, tell)


@with_config_options
@with_option_groups(memory=MemoryOptions, cost=CostOptions)
def plan(
    *,
    input_lengths: Annotated[
        str,
        typer.Option(help="Prompt tokens: a number, or two of mean, p50, p95, as p50=200,p95=900"),
    ],
    output_lengths: Annotated[str, typer.Option(help="Generated tokens, in the same way.")],
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Requests a second, at random times.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=512, help="Or: clients that each wait for their answer."),
    ] = None,
    shared_prefix: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Prompt tokens that are the same in a group.")
    ] = 0,
    groups: Annotated[int, typer.Option(min=1, max=10_000, help="Groups of such requests.")] = 1,
    memory: MemoryOptions,
    cost: CostOptions,
    as_json: AsJson = False,
    config_file: ConfigFile = None,
    config_values: dict[str, str],
) -> None:
    """How many requests fit, which policy, which block size, how much memory: from --model."""
    from inflight.cli.plan import PlanOptions
    from inflight.cli.plan import plan as run

    options = PlanOptions(
        input_lengths=input_lengths,
        output_lengths=output_lengths,
        requests_per_second=rate,
        concurrency=concurrency,
        shared_prefix=shared_prefix,
        num_groups=groups,
        memory=memory,
        cost=cost,
        as_json=as_json,
    )
    run(resolved_config(config_values, config_file), options, tell)
