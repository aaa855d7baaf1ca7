"""PlainRuntime: a device without streams, graphs and memory of its own, such as a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from inflight.model.device.runtime import Outputs


class PlainRuntime:
    """A DeviceRuntime on which everything is done when it is launched. It stands in for a GPU: the
    runner's path through graphs, buffers and copies is the same."""

    memory = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    copying = computing

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def register(self, buffer: Tensor) -> bool:
        return False

    def mark(self) -> DoneMark:
        return DoneMark()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone()

    def check(self) -> None:
        pass

    def capture(self, work: Callable[[], Outputs]) -> PlainReplay:
        return PlainReplay(work)


class DoneMark:
    def wait(self) -> None:
        pass


class PlainReplay:
    """Replays by running the work again, into the tensors that it gave the first time."""

    def __init__(self, work: Callable[[], Outputs]) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        for output, new in zip(self.outputs, self._work(), strict=True):
            output.copy_(new)
