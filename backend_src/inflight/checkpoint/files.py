"""Reading a checkpoint's small JSON files, with one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError

GGUF_BLOCKS_FILE = "gguf_blocks"
"""Beside the weights of a checkpoint that comes from a GGUF file; see ``gguf_blocks.py``.

Some loaders take every file named *.safetensors for weights, so this one has another name."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def has_safetensors(directory: Path) -> bool:
    """Whether its weights lie in files that the fused runner reads."""
    return (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises CheckpointError: unreadable, not JSON, not an object."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"model_dir: {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"model_dir: {path}: not valid JSON") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"model_dir: {path}: must hold a JSON object")
    return loaded


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As ``read_json``; {} where there is no such file."""
    return read_json(path) if path.is_file() else {}
