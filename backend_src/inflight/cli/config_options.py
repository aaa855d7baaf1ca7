"""One command-line option for each configuration key, so that no list of them is kept twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight.api.config import InflightConfig, process_environment
from inflight.api.config_sources import environment_of
from inflight.cli.config_keys import ConfigKey, config_keys

_PARAMETER = "config_values"
_SHORT_NAMES = {"model_dir": "--model"}


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer, whose parameter ``config_values`` became an option for each key.

    The command receives in it the keys given on the command line, with their values as typed:
    they are validated where every source is, in InflightConfig.
    """
    keys = config_keys()
    own = [
        parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != _PARAMETER
    ]

    def with_options(**values: Any) -> None:
        given = {key.name: values.pop(key.name) for key in keys}
        values[_PARAMETER] = {name: value for name, value in given.items() if value is not None}
        command(**values)

    signature = inspect.Signature([*own, *(_option(key) for key in keys)])
    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__name__ = command.__name__
    with_options.__doc__ = command.__doc__
    return with_options


def resolved_config(config_values: Mapping[str, str], config_file: Path | None) -> InflightConfig:
    """The configuration that a server started with these options will have. Raises ConfigError."""
    return InflightConfig.load(
        environment={**process_environment(), **environment_of(config_values)}, file=config_file
    )


def _option(key: ConfigKey) -> inspect.Parameter:
    names = [name for name in (_SHORT_NAMES.get(key.name), key.option) if name]
    option = typer.Option(
        *names,
        help=f"{key.meaning} (default: {key.default})",
        metavar="|".join(key.choices) or key.kind.upper(),
        show_default=False,
        rich_help_panel="Engine configuration",
    )
    return inspect.Parameter(
        key.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
