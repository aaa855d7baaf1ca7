"""The native library for tests: built once a machine, in the user's cache like everybody's."""

from __future__ import annotations

from functools import cache

import pytest

from inflight.native.library import Isa, NativeLibrary, load_native


@cache
def _load() -> NativeLibrary | None:
    return load_native("", every_isa=True)


def native_library() -> NativeLibrary:
    """Skips the test where there is no C++ compiler."""
    library = _load()
    if library is None:
        pytest.skip("no native library on this machine")
    return library


def library_limited_to(isa: Isa) -> NativeLibrary:
    """Skips the test where the CPU has no such instructions."""
    library = native_library()
    if isa > library.best_isa:
        pytest.skip(f"this machine has no {isa.name}")
    return library
