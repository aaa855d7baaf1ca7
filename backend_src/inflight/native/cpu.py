"""What this machine's processor computes, read from the system without loading anything."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_FLAG_LINES = ("flags", "Features")
"""On x86 and on ARM."""
_COMPUTES_BF16 = frozenset({"avx512_bf16", "bf16"})
_TELLING_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16"}
)

_ASKED_FOR = {
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "avx512": frozenset(
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
    ),
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
}
"""By instruction set of the kernels, the same as ``cpu_features.cpp`` asks the CPU itself for."""


def may_have(isa: str) -> bool:
    """False where the system says that the CPU lacks something of the instruction set."""
    flags = _cpu_flags()
    return not flags or _ASKED_FOR.get(isa, frozenset()) <= flags


def computes_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself, instead of converting every operand to fp32."""
    return bool(_cpu_flags() & _COMPUTES_BF16)


def cpu_kind() -> str:
    """The machine and those of its instruction sets that decide how it is computed on."""
    return " ".join((platform.machine(), *sorted(_cpu_flags() & _TELLING_FLAGS)))


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in _FLAG_LINES:
            return frozenset(flags.split())
    return frozenset()
