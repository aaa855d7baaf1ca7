"""build_native: compiles ``src/`` into one shared library, once for each machine and version.

It lies in ``<cache_dir>/native/<key>/``, made as ``cache_folder`` describes. The key is the SHA-256
of all that goes in: sources, compiler version, flags and instruction sets. A source
``<name>_<isa>.cpp`` is compiled with the flags of its instruction set, every other one for any
machine of this kind; which of them runs is decided when the library is loaded (``dispatch.h``).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.cache_folder import cache_root, make_once
from inflight.errors import ConfigError, InflightError
from inflight.native.cpu import may_have, usable_cores
from inflight.native.program import StoppedError, run_program

SOURCE_DIRECTORY = Path(__file__).parent / "src"
LIBRARY_NAME = "inflight_native.so"
COMPILERS = ("g++", "clang++", "c++")

BASE_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=fast", "-w",
)  # fmt: skip

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16",
    "-mprefer-vector-width=512",
)  # fmt: skip

ISA_FLAGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    # No kernels of its own yet: the portable ones run. A set for ARM gets its name and flags here,
    # its level in dispatch.h and its test in cpu_features.cpp.
    "aarch64": {},
}
"""By machine and then by instruction set: what a source of that name is compiled with."""

SUPERSEDED_BY: Mapping[str, str] = {"avx2": "avx512"}
"""A CPU with the latter runs no kernel of the former: each has one of the latter."""

PORTABLE_FLAGS: Mapping[str, tuple[str, ...]] = {"x86_64": ("-O1",)}
"""By machine: for the sources ``<name>_portable.cpp``. Of the kind x86_64 only processors from
before AVX2 run them, and every first start waits for the compiler."""

LINK_FLAGS = ("-shared", "-fopenmp", "-Wl,-z,defs")
"""The last: a function that no source has fails here, and not when the library is loaded."""

_IS_A_REASON = re.compile("error|undefined reference")
"""Of the lines of a compiler and of a linker."""

_COMPILE_SECONDS = 600
_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0
"""More than compilers that are stopped take."""
_NICENESS = 3
"""Enough that two compilers leave a whole one of two cores to a third process, and little enough
that they go on beside more."""


class NativeUnavailableError(InflightError):
    """There is no native library on this machine; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str
    isas: tuple[str, ...]
    """The instruction sets of this machine's kind that the compiler knows."""


def build_native(
    cache_dir: str,
    source_directory: Path = SOURCE_DIRECTORY,
    *,
    every_isa: bool = False,
    stop: threading.Event | None = None,
) -> Path:
    """The compiled library; waits while another process builds it.

    ``cache_dir``: "" is ~/.cache/inflight. ``every_isa``: also with the instruction sets that this
    CPU lacks or has a later one for, to compare them. ``stop``: who sets it ends the compilers; a
    build that fails sets it too. Raises NativeUnavailableError: no compiler, a source that does not
    compile, a cache that cannot be written, an end that was asked for.
    """
    stop = stop or threading.Event()
    compiler = find_compiler(stop)
    if not every_isa:
        compiler = replace(compiler, isas=_used_by_this_cpu(compiler.isas))
    sources = sorted(source_directory.glob("*.cpp"))
    key = _key(source_directory, compiler)

    def make(folder: Path, lock_fd: int) -> None:
        _compile(folder, compiler, sources, stop)

    try:
        folder = cache_root(cache_dir) / "native" / key
        library = folder / LIBRARY_NAME
        make_once(folder, make, is_made=library.is_file, on_wait=lambda: None)
        return library
    except ConfigError as error:
        raise NativeUnavailableError(str(error)) from None
    except OSError as error:
        raise NativeUnavailableError(
            f"cache_dir: {error.filename or cache_dir}: {error.strerror}"
        ) from None


def find_compiler(stop: threading.Event | None = None) -> Compiler:
    """The first C++ compiler on PATH; ``stop`` as build_native's. Raises NativeUnavailableError."""
    stop = stop or threading.Event()
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        version = _run([path, "--version"], stop)
        known = ISA_FLAGS.get(platform.machine(), {})
        isas = tuple(isa for isa, flags in known.items() if _accepts(path, flags, stop))
        return Compiler(path, version, isas)
    raise NativeUnavailableError(f"no C++ compiler found ({', '.join(COMPILERS)})")


def isa_of(source: Path) -> str | None:
    """The instruction set that a source's name asks for; None: any machine."""
    suffix = source.stem.rpartition("_")[2]
    return suffix if any(suffix in isas for isas in ISA_FLAGS.values()) else None


def _used_by_this_cpu(isas: Sequence[str]) -> tuple[str, ...]:
    usable = [isa for isa in isas if may_have(isa)]
    return tuple(isa for isa in usable if SUPERSEDED_BY.get(isa) not in usable)


def flags_for(source: Path, compiler: Compiler) -> tuple[str, ...]:
    isa = isa_of(source)
    definitions = tuple(f"-DINFLIGHT_HAVE_{known.upper()}=1" for known in compiler.isas)
    own = ISA_FLAGS[platform.machine()][isa] if isa else ()
    if source.stem.endswith("_portable"):
        own = PORTABLE_FLAGS.get(platform.machine(), ())
    return (*BASE_FLAGS, *definitions, *own)


def _compile(
    directory: Path, compiler: Compiler, sources: Sequence[Path], stop: threading.Event
) -> None:
    """Leaves nothing in ``directory`` but the library."""
    wanted = [source for source in sources if isa_of(source) in (None, *compiler.isas)]
    objects = [directory / f"{source.stem}.o" for source in wanted]

    failures: list[NativeUnavailableError] = []

    def compile_one(source: Path, target: Path) -> None:
        flags = flags_for(source, compiler)
        try:
            _run([compiler.path, *flags, "-c", str(source), "-o", str(target)], stop)
        except NativeUnavailableError as error:
            failures.append(error)  # those that are stopped by it come after it
            stop.set()

    def compile_all() -> None:
        # Compilers step back: a first start waits longer for what it does beside them. (On Linux
        # niceness is a thread's own, and its children's.)
        with ThreadPoolExecutor(usable_cores(), initializer=os.nice, initargs=(_NICENESS,)) as pool:
            list(pool.map(compile_one, wanted, objects))

    _run_beside(compile_all, stop)
    if failures:
        raise failures[0]
    output = ["-o", str(directory / LIBRARY_NAME)]
    _run([compiler.path, *LINK_FLAGS, *map(str, objects), *output], stop)
    for path in objects:
        path.unlink()


def _run_beside(work: Callable[[], None], stop: threading.Event) -> None:
    """Runs ``work``, which raises nothing, in a thread of its own, and looks ever again whether
    it is done: Python sees a signal that comes just before an endless wait only after it, and a
    pool's waits are endless. ``stop`` is set when this is left by an exception."""
    is_done = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            is_done.set()

    try:  # start() waits too, and may be interrupted when the thread runs already
        threading.Thread(target=run, name="inflight-compilers", daemon=True).start()
        while not is_done.wait(_LOOK_SECONDS):
            pass
    except BaseException:
        stop.set()
        is_done.wait(_END_SECONDS)
        raise


def _run(command: Sequence[str], stop: threading.Event) -> str:
    """Standard output. Raises NativeUnavailableError with the first line that says what failed."""
    try:
        done = run_program(command, seconds=_COMPILE_SECONDS, stop=stop)
    except StoppedError:
        raise NativeUnavailableError("compiling was stopped") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]}: {type(error).__name__}") from None
    if done.returncode != 0:
        telling = (line for line in done.stderr.splitlines() if _IS_A_REASON.search(line))
        reason = next(telling, f"exit {done.returncode}")
        raise NativeUnavailableError(f"{command[0]}: {reason}")
    return done.stdout


def _accepts(path: str, flags: Sequence[str], stop: threading.Event) -> bool:
    try:
        _run([path, *flags, "-E", "-x", "c++", os.devnull], stop)
    except NativeUnavailableError:
        if stop.is_set():
            raise
        return False
    return True


def _key(source_directory: Path, compiler: Compiler) -> str:
    digest = hashlib.sha256()
    for path in sorted(source_directory.glob("*")):
        if path.suffix in (".cpp", ".h"):
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    flags = (BASE_FLAGS, LINK_FLAGS, ISA_FLAGS, PORTABLE_FLAGS)
    settings = (platform.machine(), compiler.version, compiler.isas, flags)
    digest.update(repr(settings).encode())
    return digest.hexdigest()
