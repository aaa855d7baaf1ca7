"""llama.cpp's llama-server with a slot for each request, over HTTP streams on the loopback.

Standard library only. The client is a bare HTTP reader, because it shares the cores with the
server: one event of the stream counts as one token.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.processes import free_ports, stop
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Job, Workload

READY_SECONDS = 120
STOP_SECONDS = 20
MICRO_BATCH = 512
SLOT_STEP = 256
"""A slot's context is a multiple of this."""


class System:
    """``options.files``: the folder of the binaries; ``options.model_file``: the GGUF file."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        (self._port,) = free_ports(1)
        tokens_of_a_slot = -(-options.slot_tokens // SLOT_STEP) * SLOT_STEP
        arguments = {
            "-m": options.model_file, "-t": options.threads, "-tb": options.threads,
            "-np": options.slots, "-c": options.slots * tokens_of_a_slot,
            "-b": 2048, "-ub": MICRO_BATCH, "-fa": "on", "-ctk": "f16", "-ctv": "f16",
            "--host": "127.0.0.1", "--port": self._port, "--cache-ram": 0,
        }  # fmt: skip
        binary = Path(options.files) / "llama-server"
        command = [str(binary), "--no-webui", "--no-kv-unified"]
        command += [str(part) for pair in arguments.items() for part in pair]
        self._process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
        self._wait_ready()
        self.version = version_of(binary)
        self.settings: dict[str, Any] = {
            "threads": options.threads,
            "slots": options.slots,
            "tokens_of_a_slot": tokens_of_a_slot,
            "ubatch": MICRO_BATCH,
            "kv": "f16",
            "cache_prompt": options.reuse,
        }

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=1):
                    return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError("llama-server did not become ready") from None
            time.sleep(0.1)

    def serve(self, workload: Workload, door: str) -> Run:
        return asyncio.run(self._serve(workload))

    async def _serve(self, workload: Workload) -> Run:
        bodies = [self._body(job) for job in workload.jobs]
        records = [Record(job.job_id) for job in workload.jobs]
        began = time.perf_counter()
        calls = zip(bodies, records, strict=True)
        await asyncio.gather(*(self._ask(body, record, began) for body, record in calls))
        return Run(time.perf_counter() - began, records)

    def _body(self, job: Job) -> bytes:
        asked = {
            "prompt": job.prompt, "n_predict": job.max_tokens, "ignore_eos": True,
            "temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "stream": True,
            "cache_prompt": self._options.reuse,
        }  # fmt: skip
        return json.dumps(asked).encode()

    async def _ask(self, body: bytes, record: Record, began: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        head = (
            "POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            await writer.drain()
            await read_events(reader, record, began)
        finally:
            writer.close()
            await writer.wait_closed()

    def close(self) -> None:
        stop(self._process, STOP_SECONDS)


async def read_events(reader: asyncio.StreamReader, record: Record, began: float) -> None:
    """One answer to its end. Raises RuntimeError for what the server refuses."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {(await reader.read(300))!r}")
    last = b""
    while line := await reader.readline():
        if line.startswith(b"error"):
            raise RuntimeError(line.decode(errors="replace"))
        if not line.startswith(b"data: "):
            continue
        if b'"stop":true' in line:
            last = line
        else:
            record.tokens_came(1, time.perf_counter() - began)
    complete(record, json.loads(last[6:])["tokens_predicted"], time.perf_counter() - began)


def complete(record: Record, num_tokens: int, now: float) -> None:
    """The server holds back half a character, so that events can be fewer than tokens."""
    record.tokens_came(max(0, num_tokens - len(record.token_times)), now)


def version_of(binary: Path) -> str:
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    lines = (told.stdout + told.stderr).splitlines()
    number = next((line for line in lines if line.startswith("version")), "version unknown")
    return f"llama.cpp {number.removeprefix('version: ')}"
