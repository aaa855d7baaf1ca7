"""The file of what was measured on this machine: entries of JSON under keys that say what they are
of. A file that is missing or cannot be read has none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_entries(file: Path) -> Mapping[str, Any]:
    """Whoever reads an entry checks it: the file may be of another version, or written by hand."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def store_entry(file: Path, key: str, entry: Any) -> None:
    """Beside those of other keys; ``file`` is never seen unfinished. Raises OSError."""
    entries = {**read_entries(file), key: entry}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    unfinished.replace(file)
