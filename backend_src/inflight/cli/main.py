"""The command ``inflight``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
import yaml

import inflight
from inflight.cli.config_options import resolved_config, with_config_options
from inflight.cli.errors import StartupError
from inflight.cli.healthcheck import infer_one_token
from inflight.cli.launch import default_model_repository
from inflight.cli.ports import Endpoints
from inflight.cli.preparation import prepare as run_preparation
from inflight.cli.serve import ServeOptions, say, tell
from inflight.cli.serve import serve as run_server
from inflight.cli.sizing_commands import plan, simulate
from inflight.cli.stop_signals import exit_in_order
from inflight.errors import InflightError

app = typer.Typer(
    help="Language models in NVIDIA Triton Inference Server, with in-flight batching.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of configuration keys.")
]


@app.command()
@with_config_options
def serve(
    *,
    host: Annotated[str, typer.Option(help="IPv4 address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    model_repository: Annotated[
        Path | None, typer.Option(help="Triton's model repository; unset: the project's own.")
    ] = None,
    config_file: ConfigFile = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Append the server's whole log to this file.")
    ] = None,
    restart: Annotated[
        bool, typer.Option(help="Start a server that died again, or exit with code 1.")
    ] = True,
    ready_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds until a server that is not ready counts as failed."),
    ] = 300.0,
    config_values: dict[str, str],
) -> None:
    """Start the server and keep it running; Ctrl-C ends it."""
    run_server(
        ServeOptions(
            endpoints=Endpoints(host, http_port, grpc_port, metrics_port),
            model_repository=model_repository or default_model_repository(),
            config_values=config_values,
            config_file=config_file,
            log_file=log_file,
            restart=restart,
            ready_seconds=ready_timeout,
        )
    )


@app.command()
@with_config_options
def build(
    *,
    config_file: ConfigFile = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print what each dtype costs in accuracy.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As --report, in JSON.")] = False,
    config_values: dict[str, str],
) -> None:
    """Build the engine: packed weights, kernels and limits, compared with transformers."""
    # What both import would make every other command slower.
    from inflight.cli.build import build as run_build

    lines = tell if as_json else say
    built = run_build(resolved_config(config_values, config_file), lines)
    if report or as_json:
        from inflight.cli.report import report as print_report

        print_report(built, lines, as_json=as_json)


@app.command()
@with_config_options
def prepare(*, config_file: ConfigFile = None, config_values: dict[str, str]) -> None:
    """Convert the checkpoint, compile the kernels and build the engine, as the first serve does."""
    config = resolved_config(config_values, config_file)
    checkpoint = run_preparation(config, say)
    say(f"{checkpoint.name} is ready in {checkpoint.directory}")


@app.command()
@with_config_options
def config(*, config_file: ConfigFile = None, config_values: dict[str, str]) -> None:
    """Print the resolved configuration as YAML, as --config takes it."""
    resolved = resolved_config(config_values, config_file).model_dump(mode="json")
    typer.echo(yaml.safe_dump(resolved, sort_keys=False), nl=False)


@app.command()
@with_config_options
def doctor(
    *,
    host: Annotated[str, typer.Option(help="As of serve.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    model_repository: Annotated[Path | None, typer.Option(help="As of serve.")] = None,
    config_file: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="In JSON.")] = False,
    config_values: dict[str, str],
) -> None:
    """Say what this machine can run, and what to do about what is missing.

    Takes the options of serve. Exit code 0: it serves; 1: something needed is missing.
    """
    from inflight.cli.doctor import examination  # half a second, of numpy and the simulator

    findings = examination.examine(
        examination.Plan(
            config=resolved_config(config_values, config_file),
            endpoints=Endpoints(host, http_port, grpc_port, metrics_port),
            model_repository=model_repository or default_model_repository(),
        )
    )
    typer.echo(examination.as_json(findings) if as_json else examination.as_text(findings))
    if not examination.serves(findings):
        raise typer.Exit(1)


app.command()(simulate)
app.command()(plan)


@app.command()
def healthcheck(
    url: Annotated[str, typer.Option(help="The HTTP endpoint.")] = "http://127.0.0.1:8000",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 10.0,
) -> None:
    """Infer one token; exit code 0 only when the server gives it."""
    infer_one_token(url, timeout)


@app.command("version")
def show_version() -> None:
    """Print the versions that a bug report needs."""
    typer.echo(f"inflight {inflight.__version__}")
    typer.echo(f"python {platform.python_version()}")
    for package in ("nvidia-pytriton", "torch", "transformers", "tokenizers", "numpy"):
        typer.echo(f"{package} {_installed(package)}")


def main() -> None:
    """The entry point; every error of ours is one line and exit code 1."""
    exit_in_order()
    try:
        app()
    except StartupError as error:
        print(f"inflight: {error} (inflight doctor looks at everything)", file=sys.stderr)
        sys.exit(1)
    except InflightError as error:
        print(f"inflight: {error}", file=sys.stderr)
        sys.exit(1)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
