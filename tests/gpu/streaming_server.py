"""ServerDoor: ``inflight serve`` on the real tritonserver, asked over HTTP by threads.

The server's stub takes its modules from the first ``python3`` on PATH alone, so that is made here:
a virtual environment without pip, whose path file names the folders that this process imports from.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tests.benchmarks.compare.processes import free_ports, stop
from tests.gpu.streaming import Load, Stream

CARRIED_VARIABLE = "CARRIED_SERVER"
"""Environment variable of run.sh: the folder with what only the server needs."""
READY_SECONDS = 90.0
"""At most: a server that is not ready by then will not be."""
_STOP_SECONDS = 15.0
_NO_END_ID = -1
_LOOK_SECONDS = 60.0
_INSTALLED = ("site-packages", "dist-packages")
_ROOT = Path(__file__).parents[2]


class ServerMissingError(Exception):
    """No tritonserver runs here; the text says why."""


class ServerNotReadyError(Exception):
    """It was started; the text is the end of its log."""


def server_python(folder: Path) -> Path:
    """An interpreter for the server and its stubs that can import all they need, what was carried
    along for them before all else."""
    carried = os.environ.get(CARRIED_VARIABLE)
    venv.EnvBuilder(symlinks=True).create(folder)
    folders = [Path(carried)] if carried else []
    folders += [Path(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Not all that is installed need lie where this Python would install more.
    folders += [Path(path) for path in sys.path if Path(path).name in _INSTALLED]
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "inflight-suite.pth").write_text("\n".join(str(path.absolute()) for path in folders))
    return folder / "bin" / "python3"


class ServerDoor:
    """A context manager: the server is up inside."""

    name = "tritonserver"

    def __init__(
        self, checkpoint: Path, scratch: Path, keys: Mapping[str, int], seconds: float
    ) -> None:
        """``keys``: of the configuration. It has ``seconds`` to get ready. Raises
        ServerMissingError with the first thing that the doctor finds missing,
        ServerNotReadyError."""
        deadline = time.monotonic() + min(READY_SECONDS, seconds)
        python = server_python(scratch / "python")
        self._http, grpc, metrics = free_ports(3)
        self._log = scratch / "server.log"
        options = ["--model", str(checkpoint)]
        for name, port in (("http", self._http), ("grpc", grpc), ("metrics", metrics)):
            options += [f"--{name}-port", str(port)]
        for key, value in keys.items():
            options += [f"--{key.replace('_', '-')}", str(value)]
        _look_first(python, options)
        own = ["--no-restart", "--log-file", str(scratch / "triton.log")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "inflight.cli", "serve", *own, *options],
                env=_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_ready(deadline)
        except BaseException:
            self._end()
            raise

    def serve(self, load: Load) -> list[Stream]:
        start = threading.Barrier(load.num_streams)

        def ask(prompt: str) -> Stream:
            start.wait()
            return self._ask(prompt, load.max_tokens)

        with ThreadPoolExecutor(load.num_streams) as pool:
            return list(pool.map(ask, load.prompts()))

    def _ask(self, prompt: str, max_tokens: int) -> Stream:
        fields = {
            "text_input": prompt,
            "max_tokens": max_tokens,
            "end_id": _NO_END_ID,
            "stream": True,
            "return_num_output_tokens": True,
        }
        stream = Stream()
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._http, timeout=60)
        try:
            path = "/v2/models/inflight_llm/generate_stream"
            connection.request("POST", path, json.dumps(fields))
            for line in connection.getresponse():
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                stream.tokens_came(event["num_output_tokens"], time.perf_counter() - began)
        finally:
            connection.close()
        return stream

    def _wait_ready(self, deadline: float) -> None:
        while "inflight: ready after" not in (text := self._log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (text.strip().splitlines() or ["no output"])[-1]
                raise ServerNotReadyError(f"the server is not ready: {last}")
            time.sleep(0.1)

    def _end(self) -> None:
        stop(self._process, _STOP_SECONDS)

    def __enter__(self) -> ServerDoor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()


def _look_first(python: Path, options: Sequence[str]) -> None:
    """Raises ServerMissingError where ``inflight doctor`` says that a server would not start."""
    command = [str(python), "-m", "inflight.cli", "doctor", "--json", *options]
    try:
        looked = subprocess.run(
            command,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServerMissingError(f"inflight doctor says nothing in {_LOOK_SECONDS:.0f} s") from None
    try:
        findings = json.loads(looked.stdout)["findings"]
    except (ValueError, KeyError):
        last = (looked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ServerMissingError(f"inflight doctor: {last}") from None
    bad = [f"{each['what']}: {each['found']}" for each in findings if each["status"] == "bad"]
    if bad:
        raise ServerMissingError(bad[0])


def _environment() -> dict[str, str]:
    """This process's, without what its Python would take in place of the path file, and with a
    libpython for the stub where one was carried along."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    libraries = Path(environment.get(CARRIED_VARIABLE, ""), "libs")
    if CARRIED_VARIABLE in environment and libraries.is_dir():
        folders = [str(libraries), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return environment
