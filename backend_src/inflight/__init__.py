"""Inflight: in-flight batching for language models inside NVIDIA Triton Inference Server.

As a plain library::

    from inflight import Executor, Request

    with Executor.from_checkpoint("path/to/checkpoint") as executor:
        print(executor.generate(["The capital of France is"], max_tokens=8)[0].text)

Names are loaded when first used, so importing this package never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.api import (
        CapacitySchedulerPolicy,
        ContextChunkingPolicy,
        ExecutorConfig,
        FinishReason,
        KvCacheConfig,
        OutputConfig,
        Request,
        Response,
        Result,
        SamplingConfig,
        SchedulerConfig,
    )
    from inflight.executor import Executor, GenerationOutput

__version__ = "0.1.0"

_HOMES = {
    "CapacitySchedulerPolicy": "inflight.api",
    "ContextChunkingPolicy": "inflight.api",
    "Executor": "inflight.executor",
    "ExecutorConfig": "inflight.api",
    "FinishReason": "inflight.api",
    "GenerationOutput": "inflight.executor",
    "KvCacheConfig": "inflight.api",
    "OutputConfig": "inflight.api",
    "Request": "inflight.api",
    "Response": "inflight.api",
    "Result": "inflight.api",
    "SamplingConfig": "inflight.api",
    "SchedulerConfig": "inflight.api",
}

__all__ = [
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "Executor",
    "ExecutorConfig",
    "FinishReason",
    "GenerationOutput",
    "KvCacheConfig",
    "OutputConfig",
    "Request",
    "Response",
    "Result",
    "SamplingConfig",
    "SchedulerConfig",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'inflight' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
