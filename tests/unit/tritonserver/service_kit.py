"""Shared by the service's tests: a running LlmService over a fake executor, and its clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from inflight.api.config import InflightConfig
from inflight.tritonserver.contract import OUTPUTS
from inflight.tritonserver.service import LlmService
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_pb_utils import InferenceRequest, Metric, MetricFamily, Send, Tensor

EVERY_OUTPUT = tuple(output.name for output in OUTPUTS)
"""What the server hands to a model when the client names no outputs."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.002)


class RunningService:
    """The service, its executor, and the exit codes with which it ended its process."""

    def __init__(self, exit_process: Callable[[int], object] | None = None, **config: Any) -> None:
        self.executor = FakeExecutor()
        self.exit_codes: list[int] = []
        fields = {"cancellation_check_period_ms": 1, "stats_check_period_ms": 10} | config
        self.service = LlmService(
            self.executor,  # type: ignore[arg-type]
            InflightConfig(**fields),
            model_name="llm",
            model_version="3",
            exit_process=exit_process or self.exit_codes.append,
        )

    def submit(self, request: InferenceRequest) -> InferenceRequest:
        self.service.submit(request)
        return request


@contextmanager
def running_service(**config: Any) -> Iterator[RunningService]:
    running = RunningService(**config)
    try:
        yield running
    finally:
        running.service.close()


def text_request(
    *prompts: str,
    request_id: str = "",
    stream: bool = True,
    wants: Sequence[str] = (),
) -> InferenceRequest:
    """A request of the text door, one batch element for each prompt."""
    prompts = prompts or ("hello",)
    tensors = [
        _column("text_input", [prompt.encode() for prompt in prompts], np.object_),
        _column("max_tokens", [8] * len(prompts), np.int32),
        _column("stream", [stream] * len(prompts), np.bool_),
    ]
    tensors += [_column(name, [True] * len(prompts), np.bool_) for name in wants]
    return InferenceRequest(
        inputs=tensors, request_id=request_id, requested_output_names=EVERY_OUTPUT
    )


def ids_request(*ids: int, stream: bool = True) -> InferenceRequest:
    tensors = [
        Tensor("input_ids", np.array([ids], dtype=np.int32)),
        _column("request_output_len", [8], np.int32),
        _column("streaming", [stream], np.bool_),
    ]
    return InferenceRequest(inputs=tensors, requested_output_names=EVERY_OUTPUT)


def stop_request(
    request_id: str, requested_output_names: Sequence[str] = EVERY_OUTPUT
) -> InferenceRequest:
    return InferenceRequest(
        inputs=[_column("stop", [True], np.bool_)],
        request_id=request_id,
        requested_output_names=requested_output_names,
    )


def sends(request: InferenceRequest) -> list[Send]:
    """Everything sent, once FINAL is out; it must be the last and the only one."""
    recorded = request.sender.sends
    wait_until(lambda: recorded and recorded[-1].is_final, "the final response")
    assert [send.is_final for send in recorded] == [False] * (len(recorded) - 1) + [True]
    return recorded


def value(send: Send, name: str) -> Any:
    (only,) = send.output(name).reshape(-1).tolist()
    return only.decode() if isinstance(only, bytes) else only


def texts(request: InferenceRequest) -> list[str]:
    return [value(send, "text_output") for send in sends(request)]


def metric(family: str, **labels: str) -> Metric:
    return MetricFamily.registry[family].metric(**labels)


def _column(name: str, values: Sequence[Any], dtype: Any) -> Tensor:
    return Tensor(name, np.array(values, dtype=dtype).reshape(-1, 1))
