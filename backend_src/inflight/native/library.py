"""NativeLibrary: the compiled kernels, called through ctypes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch  # noqa: F401  its OpenMP runtime has to be in the process before ours asks for one

from inflight.native.build import NativeUnavailableError, build_native

_LOG = logging.getLogger(__name__)

Pointer = ctypes.c_void_p
"""An address as an int (``tensor.data_ptr()``), or None."""
Int = ctypes.c_int64
Float = ctypes.c_float
Double = ctypes.c_double


class Isa(IntEnum):
    """Instruction sets in ascending order; the numbers are those of ``dispatch.h``.

    AVX512 stands for F, BW, DQ, VL, VNNI and BF16 together, AMX for those and its bf16 and int8
    tiles. A kernel without a version for the chosen set runs the next lower one that it has.
    """

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3


class FunctionSource(Protocol):
    """What the classes around native kernels take their functions from."""

    def function(self, name: str, *types: Any, result: Any = None) -> Callable[..., Any]:
        """The C function ``name``; look it up once and keep it.

        ``types`` are Pointer, Int, Float or Double for each parameter; ``result`` is one of them or
        None for void.
        """
        ...


class NativeLibrary:
    """Functions of the shared library; calls release the GIL.

    The instruction set and the size of the thread team belong to the process: two objects made
    from one file share them.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be loaded."""
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, tuple[Any, tuple[Any, ...], Any]] = {}
        self._set_isa = self.function("inflight_set_isa", Int, result=Int)
        self._set_num_threads = self.function("inflight_set_num_threads", Int)
        self.best_isa = Isa(self.function("inflight_best_isa", result=Int)())
        """The highest instruction set that the CPU, the system and the compiler have."""

    def function(self, name: str, *types: Any, result: Any = None) -> Callable[..., Any]:
        if name not in self._functions:
            function = self._library[name]
            function.argtypes = list(types)
            function.restype = result
            self._functions[name] = (function, types, result)
        function, known_types, known_result = self._functions[name]
        assert (types, result) == (known_types, known_result), f"two signatures for {name}"
        return function  # type: ignore[no-any-return]

    @property
    def isa(self) -> Isa:
        """The instruction set in use."""
        return Isa(self.function("inflight_isa", result=Int)())

    @contextmanager
    def limited_to(self, isa: Isa) -> Iterator[None]:
        """Uses at most ``isa`` while the block runs; for tests and comparisons."""
        before = self._set_isa(min(isa, self.best_isa))
        try:
            yield
        finally:
            self._set_isa(before)

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of every parallel call from now on; at first what OpenMP would take."""
        assert num_threads >= 1
        self._set_num_threads(num_threads)


def load_native(cache_dir: str, *, every_isa: bool = False) -> NativeLibrary | None:
    """The library for this machine, built when it is not in the cache yet (seconds). ``every_isa``:
    for ``limited_to``, which else may find no kernels but the portable ones below the best.

    None, with one warning line, where it cannot be had: the caller computes with torch instead.
    """
    try:
        return NativeLibrary(build_native(cache_dir, every_isa=every_isa))
    except NativeUnavailableError as error:
        reason = str(error)
    except OSError as error:
        reason = f"the compiled library cannot be loaded: {error}"
    _LOG.warning("native kernels are off, torch computes instead (slower): %s", reason)
    return None
