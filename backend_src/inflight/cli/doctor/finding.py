"""Finding: one thing that was looked at. Every look is a function that returns one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from inflight.cli.errors import StartupError
from inflight.errors import InflightError, one_line


class Status(Enum):
    GOOD = "good"
    NOTE = "note"
    """It serves; something would be faster, or cannot be told."""
    BAD = "bad"
    """It does not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    found: str
    means: str
    """For serving."""
    status: Status = Status.GOOD
    remedy: str = ""
    """What to do about it, a command where there is one; empty where there is nothing to do."""


_MIB, _GIB = 1 << 20, 1 << 30


def size_text(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"


def of_check(what: str, check: Callable[[], None], *, found: str, means: str) -> Finding:
    """A check that raises where it finds something bad, as a finding; ``found``, ``means``: of a
    check that passes."""
    try:
        check()
    except StartupError as error:
        return Finding(
            what=what,
            found=error.problem,
            means="the server would not start",
            status=Status.BAD,
            remedy=error.remedy,
        )
    return Finding(what=what, found=found, means=means)


def guarded(what: str, look: Callable[[], Finding]) -> Finding:
    """What ``look`` finds. A look that fails is a finding too, so that the others are still seen.

    An error of ours says that something needed is wrong; any other that it could not be looked at.
    """
    try:
        return look()
    except InflightError as error:
        means, status = "the server would not start", Status.BAD
        return Finding(what=what, found=one_line(error), means=means, status=status)
    except Exception as error:
        found = f"{type(error).__name__}: {one_line(error)}"
        means = "this could not be looked at"
        return Finding(what=what, found=found, means=means, status=Status.NOTE)
