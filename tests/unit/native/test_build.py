"""build_native: one build for a key, whole or not there at all; and what is said where none is."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inflight.native import build
from inflight.native.build import (
    ISA_FLAGS,
    SOURCE_DIRECTORY,
    NativeUnavailableError,
    build_native,
    find_compiler,
    flags_for,
    isa_of,
)
from inflight.native.library import load_native
from tests.fakes.sleeping_compiler import SleepingCompiler

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two sources that need each other."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("int part();\n")
    (folder / "part.cpp").write_text('#include "answer.h"\nint part() { return 40; }\n')
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\n'
        'extern "C" __attribute__((visibility("default"))) int answer() { return part() + 2; }\n'
    )
    return folder


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def contents(cache_dir: Path) -> set[str]:
    return {path.name for path in (cache_dir / "native").iterdir()}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sources that are compiled from now on."""
    names: list[str] = []
    run = build._run

    def counting(command: list[str], stop: threading.Event) -> str:
        if "-c" in command:
            names.append(Path(command[command.index("-c") + 1]).name)
        return run(command, stop)

    monkeypatch.setattr(build, "_run", counting)
    return names


@needs_compiler
def test_a_build_is_made_once_and_holds_nothing_but_the_library(
    sources: Path, tmp_path: Path, compilations: list[str]
) -> None:
    library = build_native(str(tmp_path / "cache"), sources)
    assert answer(library) == 42
    assert build_native(str(tmp_path / "cache"), sources) == library
    assert sorted(compilations) == ["answer.cpp", "part.cpp"]
    assert [path.name for path in library.parent.iterdir()] == [build.LIBRARY_NAME]
    key = library.parent.name
    assert contents(tmp_path / "cache") == {key, f"{key}.lock"}


@needs_compiler
@pytest.mark.parametrize("changed", ["part.cpp", "answer.h"])
def test_other_sources_are_another_build(sources: Path, tmp_path: Path, changed: str) -> None:
    first = build_native(str(tmp_path), sources)
    (sources / changed).write_text((sources / changed).read_text().replace("40", "50") + "\n")
    second = build_native(str(tmp_path), sources)
    assert first != second and first.is_file()
    assert answer(second) == (52 if changed == "part.cpp" else 42)


@needs_compiler
def test_another_compiler_is_another_build(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_native(str(tmp_path), sources)
    compiler = find_compiler()
    newer = build.Compiler(compiler.path, compiler.version + " later", compiler.isas)
    monkeypatch.setattr(build, "find_compiler", lambda stop: newer)
    assert build_native(str(tmp_path), sources) != first


@needs_compiler
def test_two_builders_make_one_build(
    sources: Path, tmp_path: Path, compilations: list[str]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: build_native(str(tmp_path), sources), range(4)))
    assert len(libraries) == 1 and len(compilations) == 2


@needs_compiler
def test_compilers_step_back_and_nobody_else(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, levels, run = os.nice(0), set[int](), build._run

    def looking(command: list[str], stop: threading.Event) -> str:
        if "-c" in command:
            done = subprocess.run(["nice"], capture_output=True, text=True, check=True)
            levels.add(int(done.stdout))
        return run(command, stop)

    monkeypatch.setattr(build, "_run", looking)
    build_native(str(tmp_path), sources)
    assert levels == {min(before + 3, 19)} and os.nice(0) == before


@needs_compiler
def test_a_source_that_does_not_compile_leaves_nothing_and_says_why(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "part.cpp").write_text("int part() { return missing_name; }\n")
    with pytest.raises(NativeUnavailableError, match="part.cpp:1:.*missing_name"):
        build_native(str(tmp_path), sources)
    assert all(name.endswith(".lock") for name in contents(tmp_path))


@needs_compiler
def test_an_interrupted_build_leaves_nothing_and_the_next_one_works(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build._run

    def interrupted(command: list[str], stop: threading.Event) -> str:
        if "-shared" in command:
            raise KeyboardInterrupt
        return run(command, stop)

    with monkeypatch.context() as patch:
        patch.setattr(build, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_native(str(tmp_path), sources)
    assert all(name.endswith(".lock") for name in contents(tmp_path))
    assert answer(build_native(str(tmp_path), sources)) == 42


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_while_it_compiles_ends_the_compilers(
    sources: Path, tmp_path: Path, number: int
) -> None:
    """In the main thread, as where an engine is built or loaded; SIGTERM as of a program that
    makes an exception of it."""
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from inflight.native.build import build_native\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "build_native(sys.argv[1], Path(sys.argv[2]))\n"
    )
    compiler, cache = SleepingCompiler(tmp_path / "bin"), tmp_path / "cache"
    command = [sys.executable, "-c", program, str(cache), str(sources)]
    environment = os.environ | {"PATH": compiler.path}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        compiler.wait_until_it_sleeps()
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == (3 if number == signal.SIGTERM else -signal.SIGINT)
    assert compiler.left_running() == []
    assert all(name.endswith(".lock") for name in contents(cache))


def test_a_compiler_that_fails_ends_the_others(sources: Path, tmp_path: Path) -> None:
    compiler = SleepingCompiler(tmp_path / "bin", fails_at="part.cpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", compiler.path)
        patch.setattr(build, "usable_cores", lambda: 2)
        with pytest.raises(NativeUnavailableError, match="part.cpp: error: no"):
            build_native(str(tmp_path / "cache"), sources)
    assert compiler.left_running() == []


@needs_compiler
def test_sources_of_instruction_sets_that_the_compiler_lacks_are_left_out(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (sources / "part.cpp").write_text(
        "#ifdef INFLIGHT_HAVE_FUTURE\nint future();\nint part() { return future(); }\n"
        "#else\nint part() { return 0; }\n#endif\n"
    )
    (sources / "thing_future.cpp").write_text("int future() { return HOPE; }\n")
    for flag, wanted in (("-DHOPE=7", 9), ("-mno-such-instructions", 2)):
        monkeypatch.setattr(build, "ISA_FLAGS", {platform.machine(): {"future": (flag,)}})
        assert answer(build_native(str(tmp_path), sources)) == wanted
    assert compilations.count("thing_future.cpp") == 1


@needs_compiler
@pytest.mark.parametrize(
    ("of_cpu", "compiled"),
    [
        ({"avx2"}, ["thing_avx2.cpp"]),
        ({"avx2", "avx512"}, ["thing_avx512.cpp"]),
        ({"avx2", "avx512", "amx"}, ["thing_amx.cpp", "thing_avx512.cpp"]),
        (set(), []),
    ],
    ids=lambda names: "+".join(sorted(names)) or "none",
)
def test_only_what_this_cpu_runs_is_compiled(
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compilations: list[str],
    of_cpu: set[str],
    compiled: list[str],
) -> None:
    flags = {isa: (f"-DFOR_{isa}",) for isa in ("avx2", "avx512", "amx")}
    monkeypatch.setattr(build, "ISA_FLAGS", {platform.machine(): flags})
    monkeypatch.setattr(build, "may_have", lambda isa: isa in of_cpu)
    for isa in flags:
        (sources / f"thing_{isa}.cpp").write_text(f"int thing_{isa}() {{ return 1; }}\n")
    lean = build_native(str(tmp_path), sources)
    assert sorted(compilations) == sorted(["answer.cpp", "part.cpp", *compiled])
    compilations.clear()
    whole = build_native(str(tmp_path), sources, every_isa=True)
    assert whole != lean and len(compilations) == 5 and answer(lean) == answer(whole) == 42


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets are those of x86_64")
@pytest.mark.parametrize("num_sets", range(4))
def test_the_kernels_of_every_cpu_are_a_whole_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_sets: int
) -> None:
    """A kernel that calls one of a set which this CPU lacks would leave it without a library."""
    of_cpu = list(ISA_FLAGS["x86_64"])[:num_sets]
    monkeypatch.setattr(build, "may_have", lambda isa: isa in of_cpu)
    fast = tuple("-O0" if flag == "-O3" else flag for flag in build.BASE_FLAGS)
    monkeypatch.setattr(build, "BASE_FLAGS", fast)
    library = ctypes.CDLL(str(build_native(str(tmp_path))), mode=os.RTLD_NOW)
    assert 0 <= library.inflight_best_isa() <= num_sets


@needs_compiler
def test_a_function_that_no_source_has_fails_at_the_build(sources: Path, tmp_path: Path) -> None:
    (sources / "part.cpp").write_text("int other();\nint part() { return other(); }\n")
    with pytest.raises(NativeUnavailableError, match="undefined reference to.*other"):
        build_native(str(tmp_path), sources)
    assert all(name.endswith(".lock") for name in contents(tmp_path))


@needs_compiler
def test_a_machine_of_another_kind_gets_the_portable_sources(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (sources / "thing_avx512.cpp").write_text("#error not for this machine\n")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert answer(build_native(str(tmp_path), sources)) == 42
    assert sorted(compilations) == ["answer.cpp", "part.cpp"]


@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("attention.cpp", None),
        ("attention_portable.cpp", None),
        ("attention_avx2.cpp", "avx2"),
        ("linear_bf16_amx.cpp", "amx"),
        ("cpu_features.cpp", None),
    ],
)
def test_the_name_of_a_source_says_its_instruction_set(name: str, isa: str | None) -> None:
    assert isa_of(Path(name)) == isa


def test_a_source_has_the_flags_of_its_own_instruction_set_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    compiler = build.Compiler("g++", "13", ("avx2", "avx512"))
    plain = flags_for(Path("x.cpp"), compiler)
    assert not any(flag.startswith("-m") for flag in plain)
    assert "-DINFLIGHT_HAVE_AVX512=1" in plain and "-DINFLIGHT_HAVE_AMX=1" not in plain
    own = flags_for(Path("x_avx2.cpp"), compiler)[len(plain) :]
    assert own == ISA_FLAGS["x86_64"]["avx2"]


def test_portable_kernels_are_compiled_fast_where_hardly_anybody_runs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = build.Compiler("g++", "13", ())
    for machine, wanted in (("x86_64", "-O1"), ("aarch64", "-O3")):
        monkeypatch.setattr(platform, "machine", lambda found=machine: found)
        levels = [f for f in flags_for(Path("x_portable.cpp"), compiler) if f.startswith("-O")]
        assert levels[-1] == wanted, "the compiler takes the last"


def test_a_superseded_set_has_no_kernels_that_the_later_lacks() -> None:
    for earlier, later in build.SUPERSEDED_BY.items():
        jobs = [
            path.stem.removesuffix(earlier) for path in SOURCE_DIRECTORY.glob(f"*_{earlier}.cpp")
        ]
        assert jobs
        for job in jobs:
            assert (SOURCE_DIRECTORY / f"{job}{later}.cpp").is_file()


def test_every_source_in_the_package_is_found() -> None:
    names = {path.name for path in SOURCE_DIRECTORY.glob("*.cpp")}
    assert {"cpu_features.cpp", "attention.cpp", "elementwise.cpp"} <= names


def test_without_a_compiler_there_is_one_warning_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert load_native(str(tmp_path)) is None
    assert len(caplog.records) == 1
    assert "no C++ compiler found (g++, clang++, c++)" in caplog.text


@needs_compiler
def test_a_cache_that_cannot_be_written_is_said(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NativeUnavailableError, match="^cache_dir: .*file.*: Not a directory$"):
        build_native(str(tmp_path / "file"), sources)
    with caplog.at_level(logging.WARNING):
        assert load_native(str(tmp_path / "file")) is None
    assert len(caplog.records) == 1 and "cache_dir" in caplog.text


@needs_compiler
def test_a_library_that_is_not_one_is_said(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr("inflight.native.library.build_native", lambda *_, **__: broken)
    with caplog.at_level(logging.WARNING):
        assert load_native(str(tmp_path)) is None
    assert len(caplog.records) == 1 and "cannot be loaded" in caplog.text
