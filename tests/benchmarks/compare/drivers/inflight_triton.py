"""Inflight behind Triton: ``inflight serve`` on free loopback ports, gRPC streams, text in and out.

Text prompts cannot be arbitrary ids: each id of the workload becomes a whole word that is one
token, so prompts have the same lengths and share the same prefixes; the server's own count of the
prompt's tokens is checked. One gRPC stream a request, as separate clients would have.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.drivers.inflight_engine import engine_keys
from tests.benchmarks.compare.drivers.word_prompts import WordPrompts
from tests.benchmarks.compare.processes import free_ports, stop
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Job, Workload

READY_SECONDS = 300
STOP_SECONDS = 60
NO_END_ID = -1
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


class System:
    def __init__(self, options: LoadOptions) -> None:
        import inflight

        self._words = WordPrompts(Path(options.checkpoint))
        self._log = Path(tempfile.mkdtemp(prefix="inflight-bench-")) / "server.log"
        http, grpc_port, metrics = free_ports(3)
        self._address = f"127.0.0.1:{grpc_port}"
        keys = engine_keys(options)
        command = [str(Path(sys.executable).with_name("inflight")), "serve", "--no-restart"]
        command += ["--http-port", str(http), "--grpc-port", str(grpc_port)]
        command += ["--metrics-port", str(metrics), "--model-dir", options.checkpoint]
        for key, value in keys.items():
            command += option_of(key, value)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._wait_ready()
        self.version = f"inflight {inflight.__version__}"
        self.settings = keys | {"client": "tritonclient.grpc.aio, a stream for each request"}

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while "inflight: ready after" not in self._log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.stderr.write(self._log.read_text(errors="replace"))
                self.close()
                raise RuntimeError("inflight serve did not become ready")
            time.sleep(0.1)

    def serve(self, workload: Workload, door: str) -> Run:
        return asyncio.run(self._serve(workload, door))

    async def _serve(self, workload: Workload, door: str) -> Run:
        asked = [self._inputs(job) for job in workload.jobs]
        records = [Record(job.job_id) for job in workload.jobs]
        async with grpc.InferenceServerClient(self._address) as client:
            await client.is_server_live()  # the connection is made before the clock starts
            began = time.perf_counter()
            calls = zip(workload.jobs, asked, records, strict=True)
            await asyncio.gather(
                *(
                    read_stream(client, door, inputs, len(job.prompt), record, began)
                    for job, inputs, record in calls
                )
            )
            return Run(time.perf_counter() - began, records)

    def _inputs(self, job: Job) -> list[Any]:
        return [
            tensor("text_input", "BYTES", self._words.text(job.prompt).encode(), np.object_),
            tensor("max_tokens", "INT32", job.max_tokens, np.int32),
            tensor("end_id", "INT32", NO_END_ID, np.int32),
            tensor("stream", "BOOL", True, np.bool_),
            tensor("return_num_input_tokens", "BOOL", True, np.bool_),
            tensor("return_num_output_tokens", "BOOL", True, np.bool_),
        ]

    def close(self) -> None:
        stop(self._process, STOP_SECONDS)


async def read_stream(
    client: Any, door: str, inputs: list[Any], prompt_length: int, record: Record, began: float
) -> None:
    """One request on a stream of its own, to its last response. Raises what the server answers."""

    async def asked() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": door,
            "inputs": inputs,
            "outputs": [grpc.InferRequestedOutput(name) for name in OUTPUTS],
        }

    async for result, error in client.stream_infer(asked()):
        if error is not None:
            raise error
        now = time.perf_counter() - began
        record.tokens_came(int(result.as_numpy("num_output_tokens").flat[0]), now)
        counted = int(result.as_numpy("num_input_tokens").flat[0])
        if counted != prompt_length:
            raise RuntimeError(f"the prompt has {counted} tokens, not {prompt_length}")


def tensor(name: str, datatype: str, value: object, dtype: Any) -> Any:
    made = grpc.InferInput(name, [1, 1], datatype)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


def option_of(key: str, value: object) -> list[str]:
    """A configuration key as an option of ``inflight serve``."""
    return [f"--{key.replace('_', '-')}", str(value).lower()]
