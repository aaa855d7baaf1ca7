"""DeviceRuntime: what only the device itself does: streams, graphs, pinned memory, its books."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


class Mark(Protocol):
    def wait(self) -> None:
        """Until the device has done everything that was launched before the mark."""
        ...


class Replay(Protocol):
    """Captured work."""

    @property
    def outputs(self) -> Outputs:
        """The same tensors each time; valid after a replay, until the next one."""
        ...

    def replay(self) -> None:
        """Launches the work again, on whatever its inputs hold now."""
        ...


class DeviceMemory(Protocol):
    """Bytes of the device's own memory."""

    def free(self) -> int:
        """Free on the device, what this process only keeps in reserve included."""
        ...

    def in_use(self) -> int:
        """What tensors of this process take."""
        ...

    def largest_use(self, work: Callable[[], object]) -> int:
        """Bytes that ``work`` takes at most beyond what was in use before it."""
        ...

    def release(self) -> None:
        """Gives back what is only kept in reserve, after memory has run out."""
        ...


class DeviceRuntime(Protocol):
    """Used by one thread at a time. Work is launched inside of ``computing`` or ``copying``."""

    @property
    def device(self) -> torch.device: ...

    @property
    def memory(self) -> DeviceMemory | None:
        """None: the device uses the host's memory."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Work in here runs in order, without gradients."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Work in here follows all computing so far, and computing that comes later follows it; it
        has a stream of its own."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] on the host, not filled, from where the device copies by itself."""
        ...

    def register(self, buffer: Tensor) -> bool:
        """Makes memory of the host like ``pinned`` memory, as long as ``buffer`` lives; False: the
        system does not allow it, or the device copies in no other way."""
        ...

    def mark(self) -> Mark:
        """Of the work launched so far, in this context."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host; waits for it."""
        ...

    def check(self) -> None:
        """Raises RuntimeError where the device does nothing any more for this process."""
        ...

    def capture(self, work: Callable[[], Outputs]) -> Replay:
        """Runs ``work`` and records it: its kernels, their addresses and every number of the host.
        It must not wait for the device."""
        ...
