"""``inflight serve``: look first, prepare the checkpoint, then keep the server running."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.cli import preflight
from inflight.cli.config_options import resolved_config
from inflight.cli.errors import StartupError
from inflight.cli.installation import TritonInstallation, find_installation
from inflight.cli.launch import Launch, check_first_python, server_command, server_environment
from inflight.cli.ports import Endpoints, check_ports
from inflight.cli.preparation import prepare
from inflight.cli.restarts import RestartPolicy
from inflight.cli.server_log import is_worth_showing
from inflight.cli.shared_memory import SharedMemoryPrefix, remove_leftovers
from inflight.cli.supervisor import Supervisor, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of ``inflight serve``."""

    endpoints: Endpoints
    model_repository: Path
    config_values: Mapping[str, str]
    config_file: Path | None
    log_file: Path | None
    restart: bool
    ready_seconds: float


def serve(options: ServeOptions) -> None:
    """Serves until a signal asks for the end. Raises StartupError, ConfigError."""
    config = resolved_config(options.config_values, options.config_file)
    environment = server_environment(options.config_values, options.config_file)
    installation = _look(options, environment)
    checkpoint = prepare(config, say)
    hint = preflight.speed_hint(gpu=preflight.has_gpu(), compiler=preflight.has_compiler())
    if hint is not None:
        say(hint)
    remove_leftovers()
    with (
        tempfile.TemporaryDirectory(prefix="inflight-") as scratch,
        SharedMemoryPrefix() as shared_memory,
        _log_sink(options.log_file) as show,
    ):
        command = server_command(
            installation,
            options.endpoints,
            options.model_repository,
            installation.backend_directory(Path(scratch)),
            shared_memory.prefix,
        )
        say(f"starting tritonserver with {checkpoint.name}")
        Supervisor(
            Launch(command, environment, options.endpoints),
            shared_memory,
            say=say,
            show=show,
            on_ready=lambda seconds: say(ready_text(options.endpoints, seconds)),
            policy=RestartPolicy(enabled=options.restart),
            timing=Timing(ready_deadline=options.ready_seconds),
        ).run()


def say(line: str) -> None:
    """One line of our own, on standard output; the server's lines go to standard error."""
    print(f"inflight: {line}", flush=True)


def tell(line: str) -> None:
    """As ``say``, where standard output carries something else."""
    print(f"inflight: {line}", file=sys.stderr, flush=True)


def ready_text(endpoints: Endpoints, seconds: float) -> str:
    """Where it listens, and a command to paste that streams an answer."""
    host = endpoints.reachable_host
    request = {"text_input": "The capital of France is", "max_tokens": 32, "stream": True}
    return (
        f"ready after {seconds:.1f} s: HTTP {host}:{endpoints.http_port}, "
        f"gRPC {host}:{endpoints.grpc_port}, "
        f"metrics http://{host}:{endpoints.metrics_port}/metrics\n\n"
        f"  curl -N http://{host}:{endpoints.http_port}/v2/models/inflight_llm/generate_stream "
        f"-d '{json.dumps(request)}'\n"
    )


def _look(options: ServeOptions, environment: Mapping[str, str]) -> TritonInstallation:
    preflight.check_model_repository(options.model_repository)
    check_ports(options.endpoints)
    preflight.check_shared_memory()
    installation = find_installation()
    preflight.check_numpy(installation)
    check_first_python(environment)
    preflight.check_stub_libraries(installation.stub, environment)
    return installation


@contextlib.contextmanager
def _log_sink(log_file: Path | None) -> Iterator[Callable[[str], None]]:
    """Where the server's lines go: all of them to the file, or the telling ones to the terminal."""
    if log_file is None:
        yield _show_on_terminal
        return
    try:
        stream = log_file.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise StartupError(f"--log-file {log_file}: {error.strerror}") from None
    with stream:
        yield lambda line: print(line, file=stream)


def _show_on_terminal(line: str) -> None:
    if is_worth_showing(line):
        print(line, file=sys.stderr, flush=True)
