"""Is there memory for the weights? Reads sizes only: no tensor is loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

from inflight.cli.errors import StartupError

_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library itself accepts
_LEAST_BYTES_PER_WEIGHT = {
    "auto": 2, "bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "int4": 0.5, "fp8": 1,
}  # fmt: skip
_GIB = 1 << 30

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def check_memory(checkpoint: Path, dtype: str, available_bytes: int) -> None:
    """Raises StartupError when the weights alone need more than ``available_bytes``.

    A lower bound: number of weights x bytes of ``dtype`` (2 for ``auto``), without the KV cache.
    """
    needed = number_of_weights(checkpoint) * _LEAST_BYTES_PER_WEIGHT[dtype]
    if needed > available_bytes:
        raise StartupError(
            f"not enough memory: the weights need {needed / _GIB:.1f} GiB in dtype {dtype}, "
            f"{available_bytes / _GIB:.1f} GiB are available",
            remedy="take a smaller checkpoint, or a smaller --dtype",
        )


def number_of_weights(checkpoint: Path) -> int:
    """Elements of all tensors in the folder's safetensors files, from their headers."""
    return sum(
        math.prod(tensor["shape"])
        for file in sorted(checkpoint.glob("model*.safetensors"))
        for tensor in _headers(file)
    )


def _headers(file: Path) -> Iterator[dict[str, list[int]]]:
    # The format: 8 bytes little-endian length, then that many bytes of JSON.
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(length)
            header = json.loads(stream.read(length))
        except (struct.error, ValueError):
            raise StartupError(f"{file}: not a safetensors file, or cut short") from None
    header.pop("__metadata__", None)
    yield from header.values()


def available_memory() -> int:
    """Bytes this process may still take: what the machine has, or its cgroup allows, if less."""
    rooms = [_meminfo("MemAvailable")]
    for limit, usage, stat, inactive in (
        (_CGROUP_V2 / "memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            _CGROUP_V1 / "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            text = limit.read_text().strip()
            used = int((limit.parent / usage).read_text())
            statistics = (limit.parent / stat).read_text()
        except OSError:
            continue  # the other cgroup version, or none
        if text != "max":
            # File pages that nobody used lately are given back before the limit hurts.
            rooms.append(int(text) - used + _field(statistics, inactive))
    return max(0, min(rooms))


def _meminfo(name: str) -> int:
    return _field(Path("/proc/meminfo").read_text(), name + ":") * 1024


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0
