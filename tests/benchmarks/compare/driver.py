"""Driver: how one system is loaded and served from inside its worker process.

Standard library only: workers run in the peers' own environments, where this project and its
libraries are not installed. A driver imports its system in ``__init__``, not at the top.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tests.benchmarks.compare.records import Run
from tests.benchmarks.compare.workloads import Workload

MAX_SEQ_LEN = 4096
"""Longest prompt + output that systems are loaded for."""
KV_TOKENS = 40_960
"""KV cache of the systems that are sized in tokens: W4 without sharing needs 34,304."""


@dataclass(frozen=True)
class LoadOptions:
    """All that decides how a system is loaded; a worker of other options is another worker."""

    checkpoint: str
    """A folder with config.json, safetensors weights and tokenizer.json."""
    weights: str
    """The system's own word for its weights, as ``bf16`` or ``q8_0``."""
    slots: int
    """Requests that may be in flight at once."""
    slot_tokens: int
    """Tokens that a slot must hold, for systems that divide their cache among slots."""
    reuse: bool
    """Prefix cache on."""
    threads: int
    files: str = ""
    """A folder of what the system needs besides the checkpoint, where it needs something."""
    model_file: str = ""
    """Its converted weights, where they are one file."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(loaded: Mapping[str, Any]) -> LoadOptions:
        return LoadOptions(**loaded)


class Driver(Protocol):
    """Serves greedily, end ids ignored, each job exactly ``max_tokens`` tokens."""

    version: str
    settings: dict[str, Any]
    """What a reader of the result must know to repeat it."""

    def __init__(self, options: LoadOptions) -> None:
        """Loads the system; returns when it is ready to serve."""

    def serve(self, workload: Workload, door: str) -> Run:
        """All jobs arrive as the clock starts. ``door``: which of several entrances; "" of one."""
        ...

    def close(self) -> None: ...


def make_driver(module: str, options: LoadOptions) -> Driver:
    """``module``: its full name; the driver in it is the class ``System``."""
    made: Driver = importlib.import_module(module).System(options)
    return made
