"""What a fault on a device ends: a batch, or the engine."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inflight.errors import EngineError, ForwardError
from inflight.model.device.runtime import DeviceRuntime


@contextmanager
def contained(runtime: DeviceRuntime, what: str) -> Iterator[None]:
    """Whatever is raised inside leaves as ForwardError, or as EngineError where the device does
    nothing any more. ``what`` was done, in words that may be logged.

    After memory has run out, what was computed so far is dropped, so that the next iteration finds
    room.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) and runtime.memory is not None:
            traceback.clear_frames(error.__traceback__)
            runtime.memory.release()
        try:
            runtime.check()
        except RuntimeError:
            raise EngineError(f"{runtime.device} has failed: {type(error).__name__}") from error
        raise ForwardError(f"{what} failed: {type(error).__name__}") from error
