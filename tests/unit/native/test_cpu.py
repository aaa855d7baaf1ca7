"""What is read from /proc and /sys."""

from __future__ import annotations

import os
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
    assert cpu.instruction_sets() == () and cpu.cpu_name() == platform.machine()


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("fpu sse2", ()),
        (AVX2, ("avx2",)),
        (f"{AVX2} avx512f avx512dq avx512bw avx512vl", ("avx2",)),
        (AVX512, ("avx2", "avx512")),
        (f"{AVX512} amx_tile amx_bf16 amx_int8", ("avx2", "avx512", "amx")),
        ("avx2 amx_tile amx_bf16 amx_int8", ()),
    ],
)
def test_an_instruction_set_needs_those_below_it(
    flags: str, sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: A Processor\nflags\t: {flags}\n")
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "_cpu_flags", cpu._cpu_flags.__wrapped__)
    assert cpu.instruction_sets() == sets
    assert cpu.cpu_name() == "A Processor"


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.5, 3), (0.05, 1), (8.0, 8), (64.0, 8)])
def test_usable_cores_are_capped_by_the_quota(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cpu.usable_cores() == cores


@pytest.mark.parametrize(
    ("setting", "gives"), [("always [madvise] never", True), ("always madvise [never]", False)]
)
def test_huge_pages(
    setting: str, gives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text(setting)
    monkeypatch.setattr(cpu, "_HUGE_PAGES_SETTING", tmp_path / "enabled")
    assert cpu.gives_huge_pages() is gives


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
