"""What Triton compiles with beside itself; needs neither torch nor Triton."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_NAMES = ("gcc", "clang")


def lacking_to_compile(environment: Mapping[str, str]) -> list[str]:
    """What is missing, in words, for the small C launcher that Triton compiles for each kernel, in
    the process that calls it. Empty: nothing is.

    As ``triton.runtime.build`` looks for it: the compiler that ``CC`` in ``environment`` names and
    no other, else gcc or clang.
    """
    named = environment.get("CC")
    names = _NAMES if named is None else (named,)
    lacking = []
    if not any(shutil.which(name, path=environment.get("PATH")) for name in names):
        lacking.append("C compiler")
    if not Path(_include_folder(), "Python.h").is_file():
        lacking.append("Python headers")
    return lacking


def _include_folder() -> str:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder that nobody has.
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
