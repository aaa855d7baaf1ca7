"""What the doctor says of processor, card and disks; each machine is a made one."""

from __future__ import annotations

import sysconfig
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli.doctor import accelerator, processor, storage
from inflight.cli.doctor.finding import Status
from inflight.native.build import Compiler, NativeUnavailableError

H200 = "NVIDIA H200, 143771, 143000, 580.159.03, 9.0"


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    for remembered in (accelerator.read_card, accelerator._ask_torch):
        remembered.cache_clear()
    yield
    for remembered in (accelerator.read_card, accelerator._ask_torch):
        remembered.cache_clear()


def machine_with_sets(monkeypatch: pytest.MonkeyPatch, *sets: str, compiler: str = "") -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: sets)
    found = Compiler("/usr/bin/g++", "g++ 12.2\nfree software", tuple(compiler.split()))
    monkeypatch.setattr(processor, "find_compiler", lambda: found)


def test_a_cpu_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_sets(monkeypatch, "avx2", "avx512", "amx", compiler="avx2 avx512 amx")
    monkeypatch.setattr(processor, "computes_bf16", lambda: True)
    cpu = processor.look_at_cpu()
    assert cpu.found.endswith("AMX (bf16, int8), AVX-512 (BF16, VNNI), AVX2")
    assert cpu.status is Status.GOOD and "bf16 is computed" in cpu.means
    kernels = processor.look_at_compiler()
    assert kernels.found == "g++ 12.2 in /usr/bin/g++"
    assert kernels.means.endswith("run with AMX (bf16, int8)")


def test_a_cpu_without_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_sets(monkeypatch, compiler="avx2 avx512 amx")
    monkeypatch.setattr(processor, "computes_bf16", lambda: False)
    cpu = processor.look_at_cpu()
    assert cpu.status is Status.NOTE and "portable" in cpu.means
    assert cpu.means.endswith("kernels expand bf16 as they multiply, torch is slow in it")
    assert processor.look_at_compiler().means.endswith("run with portable")


def test_a_compiler_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_sets(monkeypatch, "avx2", "avx512", "amx", compiler="avx2 avx512")
    kernels = processor.look_at_compiler()
    assert kernels.status is Status.NOTE
    assert kernels.found.endswith("which does not know AMX (bf16, int8)")
    assert kernels.means.startswith("kernels run with AVX-512") and "g++" in kernels.remedy


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Compiler:
        raise NativeUnavailableError("no C++ compiler found (g++)")

    monkeypatch.setattr(processor, "find_compiler", none)
    kernels = processor.look_at_compiler()
    assert kernels.status is Status.NOTE and kernels.remedy == "apt-get install g++"


@pytest.mark.parametrize(("usable", "means"), [(8, "all of them"), (2, "quota leaves so many")])
def test_cores(usable: int, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "usable_cores", lambda: usable)
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 8)
    cores = processor.look_at_cores()
    assert cores.found == f"{usable} of 8 may be used" and means in cores.means


def machine_with_driver(
    monkeypatch: pytest.MonkeyPatch, folder: Path, smi: str, torch_answer: str = "exit 1"
) -> None:
    """``smi``, ``torch_answer``: shell scripts in place of nvidia-smi and of the Python asked."""
    monkeypatch.setattr(accelerator, "has_gpu", lambda: True)
    for name, script in (("nvidia-smi", smi), ("python", torch_answer)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(accelerator.sys, "executable", str(folder / "python"))


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "has_gpu", lambda: False)
    assert accelerator.look_at_card().means == "the engine computes on the CPU"
    assert accelerator.look_at_torch_cuda("auto").found == "not asked"
    assert accelerator.look_at_kernel_language().status is Status.GOOD
    assert accelerator.free_on_card("auto") is None
    assert not accelerator.computes_on_card("auto")


def test_a_card_that_torch_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine_with_driver(monkeypatch, tmp_path, f"echo '{H200}'", "echo '[\"13.0\", true]'")
    card = accelerator.look_at_card()
    assert card.found == (
        "NVIDIA H200, 139.6 GiB of 140.4 GiB free, driver 580.159.03, compute capability 9.0"
    )
    assert card.means == "bf16, FP8 too"
    asked = accelerator.look_at_torch_cuda("auto")
    assert (asked.status, asked.means) == (Status.GOOD, "the engine computes on the GPU")
    assert accelerator.computes_on_card("auto")
    assert accelerator.free_on_card("auto") == 143000 << 20
    assert accelerator.look_at_torch_cuda("cuda") == asked
    assert accelerator.free_on_card("cpu") is None
    assert "as the configuration says" in accelerator.look_at_torch_cuda("cpu").means


@pytest.mark.parametrize(
    ("driver", "answer", "remedy"),
    [(False, "exit 1", "--device auto"), (True, "echo '[null, false]'", "pip install")],
)
def test_a_card_that_is_asked_for_and_not_there(
    driver: bool, answer: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with_driver(monkeypatch, tmp_path, f"echo '{H200}'", answer)
    monkeypatch.setattr(accelerator, "has_gpu", lambda: driver)
    found = accelerator.look_at_torch_cuda("cuda")
    assert found.status is Status.BAD and found.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("capability", "status", "means"),
    [("8.0", Status.GOOD, "bf16, no FP8"), ("7.5", Status.NOTE, "it computes fp16, no bf16")],
)
def test_older_cards(
    capability: str, status: Status, means: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with_driver(monkeypatch, tmp_path, f"echo 'A card, 16000, 15000, 1, {capability}'")
    card = accelerator.look_at_card()
    assert card.status is status and card.means.startswith(means)


@pytest.mark.parametrize(
    ("smi", "said"), [("echo 'No devices were found'", "No devices"), ("exit 9", "exit 9")]
)
def test_a_driver_that_says_nothing_of_use(
    smi: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with_driver(monkeypatch, tmp_path, smi)
    card = accelerator.look_at_card()
    assert card.status is Status.NOTE and said in card.found


@pytest.mark.parametrize(
    ("answer", "status", "found"),
    [
        ("echo '[null, false]'", Status.NOTE, "torch is built without CUDA"),
        ("echo '[\"13.0\", false]'", Status.NOTE, "torch is built for CUDA 13.0 and does not"),
        ("echo 'ImportError: libc10.so' >&2; exit 1", Status.BAD, "torch could not be asked: Imp"),
        ("echo nonsense", Status.BAD, "torch could not be asked: nonsense"),
    ],
)
def test_a_card_that_torch_does_not_use(
    answer: str,
    status: Status,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    machine_with_driver(monkeypatch, tmp_path, f"echo '{H200}'", answer)
    asked = accelerator.look_at_torch_cuda("auto")
    assert asked.status is status and asked.found.startswith(found)
    assert accelerator.free_on_card("auto") is None


@pytest.mark.parametrize(
    ("triton", "headers", "compiler", "found", "remedy"),
    [
        ("3.6.0", True, "gcc", "triton 3.6.0", ""),
        ("3.6.0", True, "clang", "triton 3.6.0", ""),
        (None, True, "gcc", "triton is not installed", "pip install triton"),
        ("3.6.0", False, "gcc", "no Python headers", "apt-get install g++ python3-dev"),
        ("3.6.0", True, "cc", "no C compiler", "apt-get install g++ python3-dev"),
    ],
)
def test_what_compiles_kernels_for_a_card(
    triton: str | None,
    headers: bool,
    compiler: str,
    found: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if headers:
        (tmp_path / "Python.h").touch()
    (tmp_path / compiler).touch(mode=0o755)
    monkeypatch.setattr(accelerator, "has_gpu", lambda: True)
    monkeypatch.setattr(accelerator, "installed_version", lambda package: triton)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernels = accelerator.look_at_kernel_language()
    assert found in kernels.found and kernels.remedy == remedy
    assert kernels.status is (Status.NOTE if remedy else Status.GOOD)
    assert accelerator.compiles_kernels() is not bool(remedy)
    # A compiler that is named is taken, and no other.
    monkeypatch.setenv("CC", "nowhere")
    assert not accelerator.compiles_kernels()
    monkeypatch.setenv("CC", str(tmp_path / compiler))
    assert accelerator.compiles_kernels() is (triton is not None and headers)


def test_the_cache_and_what_lies_in_it(tmp_path: Path) -> None:
    empty = storage.look_at_cache(str(tmp_path / "new"))
    assert empty.found.endswith("empty") and empty.means == "the first start fills it"
    (tmp_path / "engines" / "key").mkdir(parents=True)
    (tmp_path / "engines" / "key" / "weights").write_bytes(bytes(3 << 20))
    held = storage.look_at_cache(str(tmp_path))
    assert held.found.endswith("built engines 3 MiB") and held.status is Status.GOOD


@pytest.mark.parametrize(("held", "status"), [(True, Status.NOTE), (False, Status.BAD)])
def test_a_cache_that_cannot_be_written(
    held: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)
    if held:
        (tmp_path / "native").mkdir()
        (tmp_path / "native" / "library").write_bytes(b"x")
    found = storage.look_at_cache(str(tmp_path))
    assert found.status is status and "--cache-dir" in found.remedy


@pytest.mark.parametrize(
    ("free", "held", "status"),
    [(8, False, Status.GOOD), (1, False, Status.BAD), (1, True, Status.NOTE)],
)
def test_disk_space_for_a_first_start(
    free: int, held: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage(0, 0, free << 30))
    if held:
        (tmp_path / "checkpoints").write_bytes(b"x")
    disk = storage.look_at_disk(str(tmp_path), 2 << 30)
    assert disk.status is status and f"{free}.0 GiB free" in disk.found


def test_disk_space_when_nobody_knows_what_is_written(tmp_path: Path) -> None:
    assert storage.look_at_disk(str(tmp_path), None).status is Status.GOOD


def test_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "gives_huge_pages", lambda: False)
    assert "transparent_hugepage" in storage.look_at_huge_pages().remedy
    monkeypatch.setattr(storage, "gives_huge_pages", lambda: True)
    assert storage.look_at_huge_pages().status is Status.GOOD
