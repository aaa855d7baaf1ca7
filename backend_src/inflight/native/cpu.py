"""What this machine's processor and memory do, read from the system without loading anything."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from inflight.native.cpu_quota import cpu_quota

_CPUINFO = Path("/proc/cpuinfo")
_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FLAG_LINES = ("flags", "Features")
"""On x86 and on ARM."""
_COMPUTES_BF16 = frozenset({"avx512_bf16", "bf16"})
_TELLING_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16"}
)
_INSTRUCTION_SETS = {
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avx512": {
        "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    },
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
}  # fmt: skip
"""Ascending: each needs those before it. The flags are those that src/cpu_features.cpp asks for."""


def computes_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself, instead of converting every operand to fp32."""
    return bool(_cpu_flags() & _COMPUTES_BF16)


def cpu_kind() -> str:
    """The machine and those of its instruction sets that decide how it is computed on."""
    return " ".join((platform.machine(), *sorted(_cpu_flags() & _TELLING_FLAGS)))


def cpu_name() -> str:
    """What the maker calls the processor; the machine's kind where the system does not say."""
    names = (value for name, value in _cpuinfo() if name == "model name")
    return next(names, platform.machine())


def instruction_sets() -> tuple[str, ...]:
    """Those with kernels of their own that CPU and system have, ascending; the names are those of
    ``build.ISA_FLAGS``."""
    found: list[str] = []
    for name, flags in _INSTRUCTION_SETS.items():
        if not flags <= _cpu_flags():
            break
        found.append(name)
    return tuple(found)


def may_have(isa: str) -> bool:
    """False where the system says that the CPU lacks something of the kernels' instruction set, or
    of one before it."""
    return not _cpu_flags() or isa not in _INSTRUCTION_SETS or isa in instruction_sets()


def usable_cores() -> int:
    """Cores that this process may use: its affinity, capped by what its control groups grant."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def gives_huge_pages() -> bool:
    """Whether the system may give huge pages to memory that asks for them."""
    try:
        return "[never]" not in _HUGE_PAGES_SETTING.read_text(encoding="ascii")
    except OSError:
        return False


@cache
def _cpu_flags() -> frozenset[str]:
    flags = (value for name, value in _cpuinfo() if name in _FLAG_LINES)
    return frozenset(next(flags, "").split())


def _cpuinfo() -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
