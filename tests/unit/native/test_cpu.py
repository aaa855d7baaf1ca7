"""What is read from /proc/cpuinfo."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from inflight.native import cpu

AVX2 = "avx2 fma f16c bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("text", "bf16", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True, "avx2 avx512_bf16"),
        ("flags : fpu avx2\nflags : avx512_bf16\n", False, "avx2"),
        ("Features\t: fp asimd bf16\n", True, "asimd bf16"),
        ("nothing\n", False, ""),
    ],
)
def test_of_the_first_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, bf16: bool, flags: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(cpu, "_CPUINFO", file)
    monkeypatch.setattr(cpu, "_cpu_flags", cpu._cpu_flags.__wrapped__)
    assert cpu.computes_bf16() is bf16
    kind = cpu.cpu_kind().split()
    assert kind[0] == platform.machine() and set(flags.split()) <= set(kind[1:])


def test_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(cpu, "_cpu_flags", cpu._cpu_flags.__wrapped__)
    assert not cpu.computes_bf16() and cpu.cpu_kind() == platform.machine()


@pytest.mark.parametrize(
    ("flags", "isas"),
    [
        (AVX2, {"avx2"}),
        (f"{AVX2} avx512f avx512bw avx512dq avx512vl", {"avx2"}),
        (f"{AVX512} amx_tile", {"avx2", "avx512"}),
        (f"{AVX512} amx_tile amx_bf16 amx_int8", {"avx2", "avx512", "amx"}),
        ("sse2", set()),
        ("", {"avx2", "avx512", "amx"}),
    ],
    ids=["avx2", "half an avx512", "half an amx", "all", "old", "nobody says"],
)
def test_what_the_kernels_may_use(
    monkeypatch: pytest.MonkeyPatch, flags: str, isas: set[str]
) -> None:
    monkeypatch.setattr(cpu, "_cpu_flags", lambda: frozenset(flags.split()))
    assert {isa for isa in ("avx2", "avx512", "amx") if cpu.may_have(isa)} == isas
