"""Memory over thousands of requests on a running server: is it flat after the first thousand?

    python tests/benchmarks/soak.py [--http-port 8000] [--requests 6000] [--concurrency 32]

Start the server with `scripts/serve` on the same machine. Prints, after 1,000 requests and at the
end, the resident memory of the server and of each stub and the bytes in /dev/shm, and the growth.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WARM_UP = 1000
DOORS = ("inflight_llm", "ensemble")
WATCHED = ("tritonserver", "triton_python_backend_stub")


def ask(port: int, place: int) -> None:
    """One short request; odd ones stream, every third goes through the ensemble."""
    door, streams = DOORS[place % 3 == 0], place % 2 == 1
    body = {"text_input": f"Request {place} says", "max_tokens": 1 + place % 4, "stream": streams}
    url = f"http://127.0.0.1:{port}/v2/models/{door}/generate" + ("_stream" if streams else "")
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = reply.read().decode()
    assert '"error"' not in answer, answer[:300]


def resident() -> dict[str, int]:
    """{process: resident KiB} of the server and its stubs."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            lines = (entry / "status").read_text().splitlines()
        except OSError:
            continue
        name = Path(command[0].decode(errors="replace")).name
        if name in WATCHED:
            model = next((p for p in command if b"/1/model.py" in p), b"").decode().split("/")
            label = model[-3] if len(model) >= 3 else name
            rss = next((int(x.split()[1]) for x in lines if x.startswith("VmRSS:")), 0)
            found[f"{label} ({entry.name})"] = rss
    return found


def shared_memory() -> int:
    return sum(entry.stat().st_size for entry in os.scandir("/dev/shm") if entry.is_file())


def report(label: str, memory: Mapping[str, int], shm: int) -> None:
    print(f"{label}: /dev/shm {shm / 2**20:.1f} MiB")
    for name, size in sorted(memory.items()):
        print(f"    {name:40} {size / 1024:8.1f} MiB")


def run(port: int, places: range, concurrency: int) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda place: ask(port, place), places))
    return len(places) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--concurrency", type=int, default=32)
    arguments = parser.parse_args()
    run(arguments.http_port, range(WARM_UP), arguments.concurrency)
    time.sleep(2)
    memory, shm = resident(), shared_memory()
    report(f"after {WARM_UP} requests", memory, shm)
    rate = run(arguments.http_port, range(WARM_UP, arguments.requests), arguments.concurrency)
    time.sleep(2)
    later, shm_later = resident(), shared_memory()
    report(f"after {arguments.requests} requests ({rate:.0f} a second)", later, shm_later)
    print(f"growth: /dev/shm {(shm_later - shm) / 2**20:+.1f} MiB")
    for name in sorted(memory.keys() & later.keys()):
        print(f"    {name:40} {(later[name] - memory[name]) / 1024:+8.1f} MiB")


if __name__ == "__main__":
    main()
