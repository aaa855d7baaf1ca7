"""Triton's language, typed for who writes kernels here.

Importing this module raises ConfigError where Triton is not installed; ``missing_reason`` says so
without importing it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from inflight.errors import ConfigError


def missing_reason() -> str | None:
    """Why no kernel can be compiled here; None: Triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return "the package triton is not installed (the extra `triton`; it exists for Linux only)"


_REASON = missing_reason()
if _REASON is not None:
    raise ConfigError(f"attention_backend: {_REASON}")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402


def jit(varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a kernel, or a function that kernels call. The compiler looks up the names of what
    annotations say: ``tl.tensor`` stands for pointers, numbers and tiles.

    ``varying``: integers that change between calls. Triton would compile another version for 1 and
    for multiples of 16. Pointers belong here too when they may start anywhere in a buffer.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(varying))

    return decorate


def is_interpreted(kernel: Any) -> bool:
    """The kernel runs in Python on the host instead of being compiled."""
    return not isinstance(kernel, triton.JITFunction)


def power_of_2(number: int) -> int:
    """The smallest that is not below ``number``: sizes of tiles are powers of two."""
    assert number > 0
    return 1 << (number - 1).bit_length()


def tiles(number: int, size: int) -> int:
    """How many tiles of ``size`` hold ``number``."""
    return -(-number // size)


__all__ = [
    "OutOfResources",
    "is_interpreted",
    "jit",
    "missing_reason",
    "power_of_2",
    "tiles",
    "tl",
    "triton",
]
