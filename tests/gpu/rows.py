"""Row: one line of the suite's table, and the JSON line in which a stage prints it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any


class Outcome(Enum):
    OK = "ok"
    LOW = "low"
    """It ran, and reached less than ``target`` of ``ceiling``."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be run here; ``note`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one check or one measurement found."""

    what: str
    outcome: Outcome = Outcome.OK
    """Of a measurement it is enough to say OK: LOW follows from ``target``."""
    value: float | None = None
    unit: str = ""
    ceiling: float | None = None
    """What the machine can do, in ``unit``, measured in the same run."""
    target: float | None = None
    """The share of ``ceiling``, or where there is none the value, that is asked for at least."""
    note: str = ""

    @property
    def share(self) -> float | None:
        """``value`` of ``ceiling``."""
        if self.value is None or not self.ceiling:
            return None
        return self.value / self.ceiling

    @property
    def judged(self) -> Outcome:
        """``outcome``, and LOW where a measurement misses its target."""
        reached = self.value if self.ceiling is None else self.share
        if self.outcome is not Outcome.OK or self.target is None or reached is None:
            return self.outcome
        return Outcome.OK if reached >= self.target else Outcome.LOW

    def line(self) -> str:
        """One line of JSON; what is unset is left out."""
        values = asdict(self) | {"outcome": self.outcome.value}
        return json.dumps(
            {name: value for name, value in values.items() if value not in (None, "")}
        )


def emit(row: Row) -> None:
    """Prints the row, so that the suite has it even if the stage is ended in the next moment."""
    print(row.line(), flush=True)


def read_row(line: str) -> Row | None:
    """The row in a line of a stage's output; None for a line that is something else.

    Raises ValueError for a row that breaks the contract: a key that no row has, a wrong kind.
    """
    if not line.startswith("{"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or "what" not in values:
        return None
    _check(values)
    return Row(**values | {"outcome": Outcome(values.get("outcome", "ok"))})


def _check(values: Mapping[str, Any]) -> None:
    unknown = values.keys() - {field.name for field in fields(Row)}
    if unknown:
        raise ValueError(f"a row has no {', '.join(sorted(unknown))}")
    for name in ("value", "ceiling", "target"):
        number = values.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name}: {number!r} is not a number")
        if not math.isfinite(number):
            raise ValueError(f"{name}: {number!r} is not finite")
    for name in ("what", "unit", "note"):
        if not isinstance(values.get(name, ""), str):
            raise ValueError(f"{name}: {values[name]!r} is not text")
