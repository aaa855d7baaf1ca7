"""``engine.json`` of a built engine: what it was made of, and what is where in ``weights.bin``.

``{"checksum": SHA-256 of the rest, "engine": {"key": ..., "size": of weights.bin, ...}}``. Needs no
torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from inflight.engine_files.key import EngineKey
from inflight.errors import ConfigError, InflightError

HEADER_FILE = "engine.json"
DATA_FILE = "weights.bin"


class DamagedEngineError(InflightError):
    """The files are not what was written; the text says how it shows."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Sorts what the system says of ``path`` by what it means for the engine. Raises
    DamagedEngineError where the file is not there. Raises ConfigError for anything else: too little
    memory, too many open files or a missing permission say nothing against the engine, which other
    servers may use."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedEngineError(f"{path.name}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(
            f"cache_dir: the built engine cannot be read: {path}: {error.strerror}"
        ) from None


def write_header(folder: Path, header: dict[str, Any]) -> None:
    """It is on the disk when this returns."""
    with (folder / HEADER_FILE).open("w", encoding="utf-8") as file:
        json.dump({"checksum": _checksum(header), "engine": header}, file)
        to_disk(file)


def read_header(folder: Path) -> dict[str, Any]:
    """What ``write_header`` was given. Raises DamagedEngineError when it is not whole, or when the
    data beside it have another size; ConfigError when it cannot be read."""
    try:
        with reading(folder / HEADER_FILE):
            loaded = json.loads((folder / HEADER_FILE).read_text(encoding="utf-8"))
        header: dict[str, Any] = loaded["engine"]
        checksum, size = loaded["checksum"], header["size"]
        with reading(folder / DATA_FILE):
            found = (folder / DATA_FILE).stat().st_size
    except (ValueError, KeyError, TypeError):
        raise DamagedEngineError(f"{HEADER_FILE} is not whole") from None
    if checksum != _checksum(header):
        raise DamagedEngineError(f"{HEADER_FILE}: its checksum is wrong")
    if found != size:
        raise DamagedEngineError(f"{DATA_FILE} has {found} bytes instead of {size}")
    return header


def read_key(folder: Path) -> EngineKey:
    """What the engine in ``folder`` was made of. Raises as ``read_header`` does."""
    try:
        return EngineKey(**read_header(folder)["key"])
    except (KeyError, TypeError):
        raise DamagedEngineError(f"{HEADER_FILE} has another form") from None


def to_disk(file: IO[Any]) -> None:
    """Waits until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _checksum(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
