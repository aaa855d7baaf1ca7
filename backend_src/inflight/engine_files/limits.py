"""BuiltLimits: what an engine was built for, beside its weights.

On a CPU nothing in the weights depends on them, so a configuration that asks for more costs a new
record, never new weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

LIMITS_FILE = "limits.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltLimits:
    """Values of the configuration keys of these names, resolved."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    dtype: str
    """Of the weights."""
    kv_cache_dtype: str

    def beyond(self, built: BuiltLimits) -> Iterator[str]:
        """One text for each key in which these ask for more, or for something else."""
        for field in fields(self):
            wanted, had = getattr(self, field.name), getattr(built, field.name)
            if isinstance(wanted, int) and wanted > had:
                yield f"{field.name} {wanted} is more than the {had} it was built for"
            elif isinstance(wanted, str) and wanted != had:
                yield f"{field.name} {wanted} is not the {had} it was built for"

    def widened_to(self, wanted: BuiltLimits) -> BuiltLimits:
        """The larger of each limit, and the dtypes of ``wanted``."""
        both = {name: (value, getattr(wanted, name)) for name, value in asdict(self).items()}
        return BuiltLimits(
            **{
                name: max(pair) if isinstance(pair[0], int) else pair[1]
                for name, pair in both.items()
            }
        )


def read_limits(folder: Path) -> BuiltLimits | None:
    """Of the engine in ``folder``; None where there is no record, or none that is whole."""
    try:
        limits = BuiltLimits(**json.loads((folder / LIMITS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    kinds = {field.name: field.type for field in fields(BuiltLimits)}
    values = asdict(limits)
    is_whole = all(type(values[name]).__name__ == kind for name, kind in kinds.items())
    return limits if is_whole else None


def write_limits(folder: Path, limits: BuiltLimits) -> None:
    """Replaces the record in one step; a cache that may only be read keeps what it has."""
    fresh = folder / f"{LIMITS_FILE}.{os.getpid()}"
    with suppress(OSError):
        fresh.write_text(json.dumps(asdict(limits), indent=1), encoding="utf-8")
        fresh.rename(folder / LIMITS_FILE)
