"""Options that several commands share: a dataclass for each group, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

_COST, _POOL, _TIERS = "Cost model", "KV pool", "KV tiers"

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Where the cost model comes from; at most one of the three ways."""

    cost_file: Annotated[
        Path | None,
        typer.Option("--cost", help="Cost model as --calibrate wrote it.", rich_help_panel=_COST),
    ] = None
    calibrate_file: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="Measure the engine with --model on this machine for some seconds, KV tiers that "
            "are configured too, and write the cost model here.",
            rich_help_panel=_COST,
        ),
    ] = None
    """Written, after the engine was measured."""
    tera_flops: Annotated[
        float | None,
        typer.Option("--flops", help="Sustained TFLOP/s, not measured.", rich_help_panel=_COST),
    ] = None
    gigabytes_per_second: Annotated[
        float | None,
        typer.Option(
            "--bandwidth", help="Sustained memory bandwidth in GB/s.", rich_help_panel=_COST
        ),
    ] = None
    base_ms: Annotated[
        float,
        typer.Option(
            "--base-ms",
            min=0,
            help="With --flops: what an iteration takes beside the model, in milliseconds.",
            rich_help_panel=_COST,
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What there is for weights and KV, and how fast KV moves between its tiers."""

    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory",
            min=0,
            help="GiB for weights and KV cache; unset: what this machine has free.",
            rich_help_panel=_POOL,
        ),
    ] = None
    host_bandwidth: Annotated[
        float | None,
        typer.Option(
            "--kv-cache-host-bandwidth",
            help="GB/s between the KV pool and kv_cache_host_memory_bytes; unset: what --calibrate "
            "measured, else 5.",
            rich_help_panel=_TIERS,
        ),
    ] = None
    disk_bandwidth: Annotated[
        float | None,
        typer.Option(
            "--kv-cache-disk-bandwidth",
            help="GB/s of kv_cache_disk_bytes, read and written; unset: what --calibrate measured, "
            "else 0.5.",
            rich_help_panel=_TIERS,
        ),
    ] = None


def with_option_groups(**groups: type[Any]) -> Callable[[Command], Command]:
    """For typer: each of these parameters of a command, a dataclass whose fields are annotated with
    their options, becomes an option for each field. Names of fields are unique over the groups."""

    def expand(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for name, each in signature.parameters.items() if name not in groups]
        options = [option for group in groups.values() for option in _options(group)]

        def with_options(**values: Any) -> None:
            for name, group in groups.items():
                given = {each.name: values.pop(each.name) for each in fields(group)}
                values[name] = group(**given)
            command(**values)

        with_options.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        with_options.__name__ = command.__name__
        with_options.__doc__ = command.__doc__
        return with_options

    return expand


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    assert all(each.default is not MISSING for each in fields(group))
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )
        for each in fields(group)
    ]
