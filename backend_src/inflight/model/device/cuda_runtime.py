"""CudaRuntime: streams, graphs and memory of a CUDA device. Nothing else here calls torch.cuda."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from inflight.model.device.runtime import Outputs

_LOG = logging.getLogger(__name__)

WARM_UP_RUNS = 2
"""Before a capture: kernels are compiled and libraries take their memory."""
FP8_CAPABILITY = (8, 9)
"""The first that multiplies fp8."""


class CudaRuntime:
    """A DeviceRuntime. Contexts hold for the thread that enters them, and any thread may."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = CudaMemory(device)
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        """What all graphs take their memory from: only one runs at a time."""

    @property
    def has_fp8(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= FP8_CAPABILITY

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._copy.wait_stream(self._compute)
        try:
            with torch.inference_mode(), torch.cuda.stream(self._copy):
                yield
        finally:
            self._compute.wait_stream(self._copy)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def register(self, buffer: Tensor) -> bool:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if result:
            _LOG.warning(
                "kv_cache_host_memory_bytes: %d MiB cannot be pinned (CUDA error %d): KV blocks "
                "are copied more slowly",
                buffer.nbytes >> 20,
                result,
            )
            return False
        # Before its memory goes back to the system; at the end of the process all of it does.
        end = weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
        end.atexit = False
        return True

    def mark(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self.device))

    def to_host(self, tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return copy

    def check(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, work: Callable[[], Outputs]) -> CudaReplay:
        """Raises torch.OutOfMemoryError."""
        for _ in range(WARM_UP_RUNS):
            work()
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._compute, capture_error_mode="thread_local"
        ):
            outputs = work()
        self._pool = graph.pool()
        return CudaReplay(graph, outputs)


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class CudaReplay:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


class CudaMemory:
    """By torch's allocator, which keeps what it was given back in reserve."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        reserve = torch.cuda.memory_reserved(self._device) - self.in_use()
        return int(free) + reserve

    def in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def largest_use(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self._device)
        before = self.in_use()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def release(self) -> None:
        torch.cuda.empty_cache()
