"""What is read from /proc/cpuinfo."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from inflight.native import cpu


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
