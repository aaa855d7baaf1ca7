"""CudaRuntime on a torch.cuda that only notes what it is asked; no card, no driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.model.device.cuda_runtime import WARM_UP_RUNS, CudaRuntime

pytestmark = pytest.mark.numeric


class FakeCuda:
    """Streams have numbers; everything is noted in ``done``."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = "default"
        self.num_streams = 0
        self.pools: list[object] = []
        self.register_result = 0
        self.allocated, self.reserved, self.peak = 100, 150, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replacements = {
            "Stream": self.stream,
            "stream": self.on_stream,
            "current_stream": lambda device: SimpleNamespace(
                name=self.current, synchronize=lambda: self.note("wait for stream")
            ),
            "synchronize": lambda device: self.note("wait for device"),
            "Event": self.event,
            "CUDAGraph": lambda: SimpleNamespace(
                pool=lambda: "the pool", replay=lambda: self.note("replay")
            ),
            "graph": self.graph,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=lambda pointer, size, flags: self.register_result,
                cudaHostUnregister=lambda pointer: self.note("unregister"),
            ),
            "mem_get_info": lambda device: (1000, 4000),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: self.note("reset peak"),
            "empty_cache": lambda: self.note("empty cache"),
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    def note(self, what: str) -> None:
        self.done.append(what)

    def stream(self, device: torch.device) -> Any:
        self.num_streams += 1
        name = f"stream {self.num_streams}"
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.note(f"{name} waits for {other.name}")
        )

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.note(f"mark {stream.name}"),
            synchronize=lambda: self.note("wait for mark"),
        )

    @contextmanager
    def graph(self, graph: Any, *, pool: object, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        self.pools.append(pool)
        self.note("capture begins")
        with self.on_stream(options["stream"]):
            yield
        self.note("capture ends")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def runtime(cuda: FakeCuda) -> CudaRuntime:
    return CudaRuntime(torch.device("cuda", 0))


def test_copies_follow_what_was_computed_and_later_work_follows_them(
    cuda: FakeCuda, runtime: CudaRuntime
) -> None:
    with runtime.computing():
        assert cuda.current == "stream 1" and torch.is_inference_mode_enabled()
        with runtime.copying():
            assert cuda.current == "stream 2"
            runtime.mark().wait()
        assert cuda.current == "stream 1"
    assert cuda.current == "default" and not torch.is_inference_mode_enabled()
    assert cuda.done == [
        "stream 2 waits for stream 1",
        "mark stream 2",
        "wait for mark",
        "stream 1 waits for stream 2",
    ]


def test_a_copy_that_fails_is_followed_too(cuda: FakeCuda, runtime: CudaRuntime) -> None:
    with pytest.raises(RuntimeError, match="no"), runtime.copying():
        raise RuntimeError("no")
    assert cuda.done[-1] == "stream 1 waits for stream 2"


def test_graphs_are_captured_warm_and_share_their_memory(
    cuda: FakeCuda, runtime: CudaRuntime
) -> None:
    runs: list[str] = []

    def work() -> tuple[Tensor, ...]:
        runs.append(cuda.current)
        return (torch.zeros(len(runs)),)

    with runtime.computing():
        first = runtime.capture(work)
        runtime.capture(work)
    assert runs == 2 * (WARM_UP_RUNS + 1) * ["stream 1"]
    assert cuda.pools == [None, "the pool"]
    assert len(first.outputs[0]) == WARM_UP_RUNS + 1  # of the captured run
    cuda.done.clear()
    first.replay()
    assert cuda.done == ["replay"] and len(runs) == 2 * (WARM_UP_RUNS + 1)


def test_free_memory_counts_what_torch_keeps_in_reserve(
    cuda: FakeCuda, runtime: CudaRuntime
) -> None:
    assert runtime.memory.free() == 1000 + 150 - 100
    assert runtime.memory.in_use() == 100

    def work() -> None:
        cuda.note("work")
        cuda.peak = 170

    assert runtime.memory.largest_use(work) == 70
    assert cuda.done == ["wait for device", "reset peak", "work", "wait for device"]
    runtime.memory.release()
    assert cuda.done[-1] == "empty cache"


def test_what_comes_to_the_host_is_pinned_and_waited_for_on_its_stream_alone(
    cuda: FakeCuda, runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_empty = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        cuda.note(f"{'pinned' if pin_memory else 'pageable'} memory")
        return really_empty(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    assert runtime.pinned(5, torch.int32).shape == (5,)
    with runtime.computing():
        found = runtime.to_host(torch.arange(3))
    assert found.tolist() == [0, 1, 2]
    assert cuda.done == ["pinned memory", "pinned memory", "wait for stream"]
    runtime.check()
    assert cuda.done[-1] == "wait for device"


def test_memory_is_pinned_as_long_as_it_lives(cuda: FakeCuda, runtime: CudaRuntime) -> None:
    buffer = torch.zeros(8)
    assert runtime.register(buffer)
    assert cuda.done == []
    del buffer
    gc.collect()
    assert cuda.done == ["unregister"]


def test_memory_that_cannot_be_pinned_is_said(
    cuda: FakeCuda, runtime: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.register_result = 2
    buffer = torch.zeros(1 << 19)
    assert not runtime.register(buffer)
    assert caplog.messages[0].startswith(
        "kv_cache_host_memory_bytes: 2 MiB cannot be pinned (CUDA error 2)"
    )
    del buffer
    gc.collect()
    assert cuda.done == []
