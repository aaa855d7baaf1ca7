"""Seconds from starting the server to its first token, and its memory against weights and KV.

    python -m tests.benchmarks.start_and_memory [--repeat 3] [--dtype bf16] [--cold]

Starts `inflight serve` with the embedded model on free loopback ports, asks for one token again and
again until it comes, and stops it. --cold does it once more with an empty cache: what a first start
adds (converting, building, compiling). Memory is each process's proportional share (Pss); the
engine's stands beside the bytes of its weights and of its whole KV pool.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight.checkpoint import prepare_checkpoint
from tests.benchmarks.compare.bounds import ModelShape
from tests.benchmarks.compare.processes import free_ports, process_tree, resident_bytes, stop

KV_TOKENS = 40_960
DEADLINE_SECONDS = 600
MIB = 1 << 20


@dataclass(frozen=True)
class Start:
    seconds: float
    """From the start of the command to the first token."""
    memory: dict[str, int]
    """Bytes by process: the engine's stub, the other stubs, tritonserver, the supervisor."""


@contextmanager
def server(port: int, dtype: str, cache_dir: str) -> Iterator[subprocess.Popen[bytes]]:
    grpc_port, metrics_port = free_ports(2)
    command = [str(Path(sys.executable).with_name("inflight")), "serve", "--no-restart"]
    command += ["--http-port", str(port), "--grpc-port", str(grpc_port)]
    command += ["--metrics-port", str(metrics_port), "--dtype", dtype]
    command += ["--max-tokens-in-paged-kv-cache", str(KV_TOKENS), "--cache-dir", cache_dir]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            stop(process, 60)


def first_token(port: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when one token has come. Raises RuntimeError where the server ends instead."""
    body = json.dumps({"text_input": "The capital of France is", "max_tokens": 1}).encode()
    url = f"http://127.0.0.1:{port}/v2/models/inflight_llm/generate"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            request = urllib.request.Request(url, data=body)
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["text_output"]
                return
        except OSError:  # nobody listens yet, or the model is not ready (an HTTP error)
            time.sleep(0.05)
    raise RuntimeError("the server gave no token")


def memory_of(root: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for pid in process_tree(root):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        kind = "supervisor"
        if "triton_python_backend_stub" in command:
            kind = "engine's stub" if "/inflight_llm/" in command else "other stubs"
        elif "tritonserver" in command.split(" ")[0]:
            kind = "tritonserver"
        found[kind] = found.get(kind, 0) + resident_bytes({pid})
    return found


def measure(dtype: str, cache_dir: str) -> Start:
    (port,) = free_ports(1)
    began = time.perf_counter()
    with server(port, dtype, cache_dir) as process:
        first_token(port, process)
        seconds = time.perf_counter() - began
        return Start(seconds, memory_of(process.pid))


def kv_bytes(directory: Path) -> int:
    """Of KV_TOKENS tokens in bf16."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size
    return int(KV_TOKENS * values * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", choices=["bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--cold", action="store_true", help="also once with an empty cache")
    asked = parser.parse_args()
    directory = prepare_checkpoint("", "", progress=print).directory
    measure(asked.dtype, "")  # builds what is missing, and brings the files into memory
    starts = [measure(asked.dtype, "") for _ in range(asked.repeat)]
    seconds = [start.seconds for start in starts]
    print(f"{'first token, everything cached':40}{statistics.median(seconds):8.1f} s "
          f"({min(seconds):.1f}-{max(seconds):.1f})")  # fmt: skip
    if asked.cold:
        with tempfile.TemporaryDirectory(prefix="inflight-cold-") as empty:
            print(f"{'first token, empty cache':40}{measure(asked.dtype, empty).seconds:8.1f} s")
    weights = ModelShape.of_checkpoint(directory, asked.dtype).weight_bytes
    pool = kv_bytes(directory)
    print(f"{'weights':40}{weights / MIB:8.0f} MiB")
    print(f"{f'KV pool of {KV_TOKENS:,} tokens':40}{pool / MIB:8.0f} MiB")
    for kind, size in sorted(starts[-1].memory.items(), key=lambda item: -item[1]):
        print(f"{kind:40}{size / MIB:8.0f} MiB")


if __name__ == "__main__":
    main()
