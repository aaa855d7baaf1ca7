"""One running server, spoken to as real clients speak: HTTP, gRPC streams, /metrics."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

ROOT = Path(__file__).parent.parent.parent
REPOSITORY = ROOT / "model_repository"
MODELS = ("preprocessing", "inflight_llm", "postprocessing", "ensemble", "ensemble_sync")
READY_SECONDS = 300
_PR_SET_PDEATHSIG = 1

DTYPES = {
    "text_input": "BYTES", "messages": "BYTES", "stop_words": "BYTES", "bad_words": "BYTES",
    "cache_salt": "BYTES", "embedding_bias_words": "BYTES", "embedding_bias_weights": "FP32",
    "max_tokens": "INT32", "min_tokens": "INT32", "min_length": "INT32", "top_k": "INT32",
    "end_id": "INT32", "pad_id": "INT32", "beam_width": "INT32", "num_return_sequences": "INT32",
    "temperature": "FP32", "top_p": "FP32", "min_p": "FP32", "priority": "FP32",
    "repetition_penalty": "FP32", "presence_penalty": "FP32", "frequency_penalty": "FP32",
    "length_penalty": "FP32", "seed": "UINT64", "random_seed": "UINT64", "timeout_us": "UINT64",
    "stream": "BOOL", "stop": "BOOL", "exclude_input_in_output": "BOOL",
    "return_log_probs": "BOOL", "return_perf_metrics": "BOOL",
    "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
}  # fmt: skip
NUMPY = {"FP32": np.float32, "INT32": np.int32, "UINT64": np.uint64, "BOOL": np.bool_}


def free_ports(count: int) -> list[int]:
    """Loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Event:
    """One response of a gRPC stream; ``seconds`` since the request was sent."""

    seconds: float
    outputs: dict[str, Any] = field(default_factory=dict)
    is_final: bool = False
    error: str | None = None

    @property
    def text(self) -> str:
        return str(self.outputs.get("text_output", ""))


class Client:
    """What tests ask of a server at these addresses."""

    def __init__(self, http_port: int, grpc_port: int, metrics_port: int) -> None:
        self.http = f"http://127.0.0.1:{http_port}"
        self.http_port = http_port
        self.grpc = f"127.0.0.1:{grpc_port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def call(self, path: str, body: object = None, timeout: float = 120) -> tuple[int, Any]:
        """(status, parsed JSON or text)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.http + path, data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                status, raw = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read().decode(errors="replace")
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        """The body of a successful /generate."""
        status, body = self.call(f"/v2/models/{model}/generate", fields)
        assert status == 200, (status, body)
        assert isinstance(body, dict), body
        return body

    def refuse(self, model: str, **fields: Any) -> str:
        """The error text of a /generate that must fail with 400."""
        status, body = self.call(f"/v2/models/{model}/generate", fields)
        assert status == 400, (status, body)
        return str(body["error"])

    def stream(self, model: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of /generate_stream."""
        request = urllib.request.Request(
            f"{self.http}/v2/models/{model}/generate_stream", data=json.dumps(fields).encode()
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def open_stream(self, model: str, **fields: Any) -> socket.socket:
        """A raw HTTP connection on which a stream is running, for clients that go away."""
        body = json.dumps(fields | {"stream": True}).encode()
        connection = socket.create_connection(("127.0.0.1", self.http_port), timeout=60)
        head = (
            f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: test\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert connection.recv(200).startswith(b"HTTP/1.1 200")
        return connection

    def metrics(self) -> dict[str, float]:
        """{family{labels}: value}."""
        with urllib.request.urlopen(self.metrics_url, timeout=20) as reply:
            lines = reply.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {key: float(value) for key, _, value in pairs}

    def metric(self, family: str, label: str = "") -> float:
        """The one value of this family whose labels contain ``label``."""
        found = [
            value
            for key, value in self.metrics().items()
            if key.split("{")[0] == family and label in key
        ]
        assert len(found) == 1, (family, label, found)
        return found[0]

    def wait_for_metric(self, family: str, label: str, value: float, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while (seen := self.metric(family, label)) != value:
            assert time.monotonic() < deadline, f"{family} {label} is {seen}, not {value}"
            time.sleep(0.05)


def tensors(fields: dict[str, Any]) -> list[grpc.InferInput]:
    """gRPC inputs of shape [1, n] (the models batch)."""
    inputs = []
    for name, value in fields.items():
        kind = DTYPES[name]
        values = value if isinstance(value, list) else [value]
        array = (
            np.array([str(v).encode() for v in values], dtype=np.object_)
            if kind == "BYTES"
            else np.array(values, dtype=NUMPY[kind])
        )
        tensor = grpc.InferInput(name, [1, len(values)], kind)
        tensor.set_data_from_numpy(array.reshape(1, len(values)))
        inputs.append(tensor)
    return inputs


class GrpcStream:
    """One gRPC stream; ``ask`` sends a request, ``events`` yields until its final response."""

    def __init__(self, client: Client) -> None:
        self._client = grpc.InferenceServerClient(client.grpc)
        self._events: queue.Queue[Event] = queue.Queue()
        self._start = time.perf_counter()
        self._client.start_stream(self._on_event)

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, model: str, request_id: str = "", timeout: int | None = None, **fields: Any
    ) -> None:
        self._start = time.perf_counter()
        self._client.async_stream_infer(
            model, tensors(fields), request_id=request_id, timeout=timeout
        )

    def next(self, timeout: float = 60) -> Event:
        return self._events.get(timeout=timeout)

    def events(self, timeout: float = 60) -> list[Event]:
        got = [self.next(timeout)]
        while not got[-1].is_final:
            got.append(self.next(timeout))
        return got

    def close(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def _on_event(self, result: Any, error: Exception | None) -> None:
        now = time.perf_counter() - self._start
        if error is not None:
            self._events.put(Event(now, is_final=True, error=str(error)))
            return
        reply = result.get_response()
        final = reply.parameters["triton_final_response"].bool_param
        outputs = {}
        for output in reply.outputs:
            value = result.as_numpy(output.name).reshape(-1)
            first = value[0] if len(value) == 1 else value
            outputs[output.name] = first.decode() if isinstance(first, bytes) else first
        self._events.put(Event(now, outputs, final))


def _end_with_the_tests() -> None:
    """In the child: SIGTERM when the process that runs the tests dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """``inflight serve`` in a process of its own, on ports of its own."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        http_port, grpc_port, metrics_port = free_ports(3)
        self.client = Client(http_port, grpc_port, metrics_port)
        self._log_file = log.open("wb")
        self.process = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("inflight")), "serve"),
                *("--http-port", str(http_port), "--grpc-port", str(grpc_port)),
                *("--metrics-port", str(metrics_port), "--model-repository", str(REPOSITORY)),
                *options,
            ],
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_the_tests,
            cwd=ROOT,
        )

    def wait_ready(self, seconds: float = READY_SECONDS) -> Server:
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-4000:]
                self.stop()
                raise AssertionError(f"the server is not ready:\n{tail}")
            time.sleep(0.2)
        return self

    def is_ready(self) -> bool:
        """The models answer, and the supervisor has seen it too: from now on it restarts."""
        try:
            return "inflight: ready after" in self.log.read_text(errors="replace") and all(
                self.client.call(f"/v2/models/{model}/ready", timeout=5)[0] == 200
                for model in MODELS
            )
        except OSError:
            return False

    def descendants(self) -> dict[int, str]:
        """{pid: command line} of everything that the supervisor started."""
        parents: dict[int, list[int]] = {}
        commands: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    parents.setdefault(int(stat[1]), []).append(int(entry.name))
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    commands[int(entry.name)] = command
        found: dict[int, str] = {}
        todo = [self.process.pid]
        while todo:
            for child in parents.get(todo.pop(), []):
                found[child] = commands.get(child, "")
                todo.append(child)
        return found

    def stub_of(self, model: str) -> int:
        """Pid of the Python stub that runs a model."""
        for pid, command in self.descendants().items():
            if "triton_python_backend_stub" in command and f"/{model}/" in command:
                return pid
        raise AssertionError(f"no stub of {model}: {self.descendants()}")

    def stop(self) -> int:
        """SIGTERM, as a service manager stops it; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self._log_file.close()
        return code
