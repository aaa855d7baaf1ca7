"""``triton_python_backend_utils`` for unit tests: the part that Inflight uses, as 2.51 behaves.

tests/unit/tritonserver/conftest.py installs this module under the real name. What adapters do is
recorded: ``ResponseSender.sends``, ``MetricFamily.registry``, ``Logger.lines``. Misuse that the
real server punishes (a send after FINAL, a decreasing counter, a non-string label) raises here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """What the server raises on misuse."""


class TritonError:
    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError("a TritonError takes a str")
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named numpy array; strings are object arrays of bytes, as clients' strings arrive."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"tensor {name!r} takes a numpy array")
        if array.dtype.kind in "US":
            raise TritonModelException(f"tensor {name!r}: strings need dtype object")
        self._name = name
        self._array = np.ascontiguousarray(array) if array.ndim else array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True


class InferenceResponse:
    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        self._output_tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Send(NamedTuple):
    """One recorded ``ResponseSender.send``."""

    response: InferenceResponse | None
    flags: int

    @property
    def is_final(self) -> bool:
        return bool(self.flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    @property
    def error(self) -> str | None:
        """The error text, or None."""
        error = self.response.error() if self.response is not None else None
        return None if error is None else error.message()

    def output(self, name: str) -> np.ndarray:
        """The array of one output; KeyError when the response does not hold it."""
        tensors = self.response.output_tensors() if self.response is not None else []
        return {tensor.name(): tensor.as_numpy() for tensor in tensors}[name]

    @property
    def output_names(self) -> list[str]:
        return [t.name() for t in self.response.output_tensors()] if self.response else []


class ResponseSender:
    """Records sends; ``fail_with`` makes every send raise, as it does when the client has gone.

    The real one drops outputs that were not requested, and may die of it; this one refuses them.
    """

    def __init__(self, requested_output_names: Sequence[str] = ()) -> None:
        self._requested_output_names = requested_output_names
        self.sends: list[Send] = []
        self.cancelled = False
        self.closed = False
        self.fail_with: Exception | None = None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag {flags}.")
        if response is None and not flags:
            raise TritonModelException("Inference Response object must be provided.")
        if self.fail_with is not None:
            raise self.fail_with
        send = Send(response, flags)
        if unrequested := {*send.output_names} - {*self._requested_output_names}:
            raise TritonModelException(f"outputs that were not requested: {unrequested}")
        self.sends.append(send)
        self.closed = bool(flags)

    def is_cancelled(self) -> bool:
        return self.cancelled


BlsModel = Callable[["InferenceRequest"], Iterable[InferenceResponse]]
bls_models: dict[str, BlsModel] = {}
"""What ``InferenceRequest.exec`` calls, by model name; tests fill it."""


class InferenceRequest:
    """As the server hands it to ``execute``, and as a BLS call makes it."""

    def __init__(
        self,
        *,
        inputs: Sequence[Tensor] = (),
        request_id: str = "",
        correlation_id: int = 0,
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._inputs = list(inputs)
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._requested_output_names = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._parameters = json.dumps(dict(parameters or {}))
        self.sender = ResponseSender(self._requested_output_names)
        """The sender that ``get_response_sender`` hands out, for tests to look at."""

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._requested_output_names

    def model_name(self) -> str:
        return self._model_name

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        """Microseconds; 0 = the client set none."""
        return self._timeout

    def parameters(self) -> str:
        """A JSON object as text."""
        return self._parameters

    def is_cancelled(self) -> bool:
        return self.sender.cancelled

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def _call(self) -> Iterator[InferenceResponse]:
        model = bls_models.get(self._model_name)
        if model is None:
            return iter([InferenceResponse(error=TritonError("no such model"))])
        return iter(model(self))

    def exec(self, decoupled: bool = False) -> Any:
        """One response, or with ``decoupled`` an iterator over all of them."""
        responses = self._call()
        return responses if decoupled else next(responses)

    async def async_exec(self, decoupled: bool = False) -> Any:
        return self.exec(decoupled)


@dataclass
class Metric:
    kind: int
    labels: dict[str, str]
    buckets: tuple[float, ...] = ()
    total: float = 0.0
    observations: list[float] = field(default_factory=list)
    updates: int = 0
    """How often the metric was touched; each is a round trip to the real server."""

    def increment(self, value: float) -> None:
        if self.kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram has no increment")
        if self.kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("decreasing a counter aborts the real server")
        self.updates += 1
        self.total += value

    def set(self, value: float) -> None:
        if self.kind != MetricFamily.GAUGE:
            raise TritonModelException("only a gauge has set")
        self.updates += 1
        self.total = value

    def observe(self, value: float) -> None:
        if self.kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("only a histogram has observe")
        self.updates += 1
        self.observations.append(value)

    def value(self) -> float:
        return self.total


class MetricFamily:
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    registry: dict[str, MetricFamily] = {}
    """Every family made, by name."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        if not all(part.isalnum() or part in "_:" for part in name):
            raise TritonModelException(f"invalid metric name {name!r}")
        known = MetricFamily.registry.get(name)
        if known is not None and known.kind != kind:
            raise TritonModelException(f"{name!r} exists with another kind")
        self.name = name
        self.description = description
        self.kind = kind
        self.metrics: list[Metric] = known.metrics if known is not None else []
        MetricFamily.registry[name] = self

    def Metric(  # noqa: N802 (the real name)
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        labels = dict(labels or {})
        for key, value in labels.items():
            if "-" in key or not isinstance(value, str):
                raise TritonModelException(f"invalid label {key!r}: {value!r}")
        if (self.kind == MetricFamily.HISTOGRAM) != (buckets is not None):
            raise TritonModelException("a histogram, and only a histogram, takes buckets")
        metric = Metric(self.kind, labels, tuple(buckets or ()))
        self.metrics.append(metric)
        return metric

    def metric(self, **labels: str) -> Metric:
        """The one metric that has these labels (others may be there too)."""
        (found,) = [m for m in self.metrics if labels.items() <= m.labels.items()]
        return found


class Logger:
    lines: list[tuple[str, str]] = []
    """(level, message) of everything logged."""

    @staticmethod
    def log_info(message: str) -> None:
        Logger.lines.append(("info", message))

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.lines.append(("warn", message))

    @staticmethod
    def log_error(message: str) -> None:
        Logger.lines.append(("error", message))

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.lines.append(("verbose", message))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def reset() -> None:
    """Forgets everything recorded; called between tests."""
    MetricFamily.registry.clear()
    Logger.lines.clear()
    bls_models.clear()
