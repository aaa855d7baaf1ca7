from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from inflight.api.response import FinishReason, Result
from inflight.errors import InvalidRequestError, RequestFailedError
from inflight.tritonserver import sync
from inflight.tritonserver.in_flight import ReplyShape
from inflight.tritonserver.parsed import Door, Wants
from inflight.tritonserver.responses import error_response, responses_of, stop_response
from inflight.tritonserver.sync import ENGINE_MODEL, SyncService
from tests.fakes import fake_pb_utils
from tests.fakes.fake_pb_utils import (
    InferenceRequest,
    InferenceResponse,
    TritonError,
    get_input_tensor_by_name,
)
from tests.unit.tritonserver.service_kit import sends, stop_request, text_request, value


class EngineModel:
    """Stands for inflight_llm: answers each prompt with its reverse; "wait" waits for its stop."""

    def __init__(self) -> None:
        self.calls: list[InferenceRequest] = []
        self.responses: list[weakref.ref[InferenceResponse]] = []
        self._stopped = threading.Event()
        fake_pb_utils.bls_models[ENGINE_MODEL] = self.answer

    def answer(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        self.calls.append(request)
        if get_input_tensor_by_name(request, "stop") is not None:
            self._stopped.set()
            return self._sent([stop_response(request.requested_output_names())])
        prompts = get_input_tensor_by_name(request, "text_input")
        assert prompts is not None
        texts = [prompt.decode() for prompt in prompts.as_numpy().reshape(-1).tolist()]
        reason = FinishReason.LENGTH
        if texts == ["wait"]:
            assert self._stopped.wait(5), "no stop request came"
            reason = FinishReason.CANCELLED
        shape = ReplyShape(
            door=Door.TEXT,
            streaming=False,
            num_elements=len(texts),
            wants=Wants(log_probs=True, num_output_tokens=True),
            requested_outputs=frozenset(request.requested_output_names()),
        )
        return self._sent(
            [
                response
                for index, text in reversed(list(enumerate(texts)))
                for response in responses_of(_result(text[::-1], reason), shape, index)
            ]
        )

    def _sent(self, responses: list[InferenceResponse]) -> Iterator[InferenceResponse]:
        self.responses += [weakref.ref(response) for response in responses]
        return iter(responses)

    @property
    def held(self) -> int:
        """How many of the responses somebody still holds."""
        return sum(response() is not None for response in self.responses)

    @property
    def stops(self) -> list[InferenceRequest]:
        return [call for call in self.calls if get_input_tensor_by_name(call, "stop") is not None]


def _result(text: str, reason: FinishReason) -> Result:
    return Result(
        is_final=True,
        text=text,
        output_token_ids=tuple(map(ord, text)),
        num_output_tokens=len(text),
        finish_reason=reason,
        log_probs=tuple(-1.0 for _ in text),
    )


@pytest.fixture
def model() -> EngineModel:
    return EngineModel()


def unary(*prompts: str, request_id: str = "") -> InferenceRequest:
    return text_request(*prompts, request_id=request_id, stream=False)


def execute(requests: Sequence[InferenceRequest]) -> None:
    """What Triton does with a batch that its batcher has gathered."""
    service = SyncService()

    async def run() -> None:
        assert await service.execute(requests) is None
        await service.drain()

    asyncio.run(run())


def test_each_request_gets_its_own_answer(model: EngineModel) -> None:
    requests = [unary("abc"), unary("de")]
    execute(requests)
    for request, text in zip(requests, ("cba", "ed"), strict=True):
        (only,) = sends(request)
        assert value(only, "text_output") == text
        assert value(only, "finish_reason") == "length"


def test_a_short_request_does_not_wait_for_a_long_one(model: EngineModel) -> None:
    long, short = unary("wait", request_id="long"), unary("abc")
    short_was_first = []
    service = SyncService()

    async def run() -> None:
        await service.execute([long])
        await service.execute([short])
        while not short.sender.sends:
            await asyncio.sleep(0.001)
        short_was_first.append(not long.sender.sends)
        await service.execute([stop_request("long")])
        await service.drain()

    asyncio.run(run())
    assert short_was_first == [True]
    assert value(sends(long)[0], "finish_reason") == "cancelled"


def test_the_answers_of_a_batch_become_one_in_order(model: EngineModel) -> None:
    request = unary("abc", "d", "ef")
    execute([request])
    (only,) = sends(request)
    assert only.output("text_output").tolist() == [b"cba", b"d", b"fe"]
    assert only.output("batch_index").tolist() == [[0], [1], [2]]
    assert only.output("num_output_tokens").tolist() == [[3], [1], [2]]
    np.testing.assert_array_equal(
        only.output("output_log_probs"),
        np.float32([[[-1, -1, -1]], [[-1, 0, 0]], [[-1, -1, 0]]]),
    )


def test_inputs_parameters_and_id_go_along(model: EngineModel) -> None:
    request = InferenceRequest(
        inputs=unary("abc").inputs(),
        request_id="mine",
        requested_output_names=["text_output"],
        timeout=1_000,
        parameters={"priority": 0.7, "ignore": True, "n": 3, "name": "x"},
    )
    execute([request])
    (call,) = model.calls
    assert (call.request_id(), call.timeout()) == ("mine", 1_000)
    assert call.inputs() == request.inputs()
    assert set(call.requested_output_names()) == {"text_output", "batch_index"}
    (only,) = sends(request)
    assert only.output_names == ["text_output"], "batch_index was asked for by us alone"
    # A call between models takes bool, int and str, no float.
    assert call.parameters() == '{"priority": "0.7", "ignore": true, "n": 3, "name": "x"}'


def test_requests_without_an_id_get_one_each(model: EngineModel) -> None:
    execute([unary("abc"), unary("de")])
    ids = [call.request_id() for call in model.calls]
    assert all(ids) and len(set(ids)) == 2


def test_a_client_that_has_gone_ends_its_request(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "WATCH_SECONDS", 0.01)
    gone, there = unary("wait"), unary("abc")
    gone.sender.cancelled = True
    execute([gone, there])
    assert value(sends(gone)[0], "finish_reason") == "cancelled"
    assert value(sends(there)[0], "text_output") == "cba"
    waiting = next(c for c in model.calls if c.inputs()[0].as_numpy().tolist() == [[b"wait"]])
    assert {stop.request_id() for stop in model.stops} == {waiting.request_id()}


def test_the_engines_responses_are_held_until_the_stub_has_forgotten_them(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, held = unary("ab", "c"), []

    def looked_up_in_order() -> bool:
        held.append(model.held)
        return False

    monkeypatch.setattr(request, "is_cancelled", looked_up_in_order)
    execute([request])
    assert held[-1] == 2, "looked up once more, with both in our hands"


def test_a_cancellation_that_is_known_already_tells_nothing_of_the_stub(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "WATCH_SECONDS", 0.01)
    held_after: list[int] = []

    async def run() -> None:
        service = SyncService()
        for request in (gone, unary("abc")):
            await service.execute([request])
            await service.drain()
            held_after.append(model.held)

    gone = unary("wait")
    gone.sender.cancelled = True
    asyncio.run(run())
    assert held_after == [1 + len(model.stops), 0]


def test_a_stop_request_passes_through(model: EngineModel) -> None:
    request = stop_request("other")
    execute([request])
    (only,) = sends(request)
    assert value(only, "finish_reason") == "cancelled"
    assert [stop.request_id() for stop in model.stops] == ["other"]


@pytest.mark.parametrize("how", ["input", "parameter"])
def test_a_stop_request_gets_no_id_from_us(model: EngineModel, how: str) -> None:
    as_parameter = InferenceRequest(
        requested_output_names=["text_output"], parameters={"stop": True}
    )
    execute([stop_request("") if how == "input" else as_parameter])
    (call,) = model.calls
    assert call.request_id() == "", "so that the engine model says what is missing"


def test_streaming_is_refused(model: EngineModel) -> None:
    request = text_request("abc", stream=True)
    execute([request])
    (only,) = sends(request)
    assert only.error is not None and only.error.startswith("stream: True")
    assert only.response is not None
    assert only.response.error().code() == TritonError.INVALID_ARG
    assert model.calls == []


@pytest.mark.parametrize("parameters", [{"streaming": True}, {"stream": "true"}])
def test_streaming_is_refused_as_a_parameter(
    model: EngineModel, parameters: dict[str, object]
) -> None:
    request = InferenceRequest(
        inputs=unary("abc").inputs(),
        requested_output_names=["text_output"],
        parameters=parameters,
    )
    execute([request])
    (only,) = sends(request)
    assert only.error is not None and only.error.startswith(f"{next(iter(parameters))}: True")
    assert model.calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("top_p", 3, "must be between 0 and 1"), TritonError.INVALID_ARG),
        (RequestFailedError("the batch failed"), TritonError.INTERNAL),
    ],
)
def test_the_engine_models_errors_are_passed_on(error: Exception, code: int) -> None:
    def refuse(_: InferenceRequest) -> list[InferenceResponse]:
        sent = error_response(error).error()  # type: ignore[arg-type]
        return [InferenceResponse(error=TritonError(sent.message()))]  # the code is lost

    fake_pb_utils.bls_models[ENGINE_MODEL] = refuse
    request = unary("abc")
    execute([request])
    (only,) = sends(request)
    assert only.error is not None and only.error.endswith(str(error))
    assert only.response is not None and only.response.error().code() == code


def _raises(_: InferenceRequest) -> list[InferenceResponse]:
    raise RuntimeError("/secret/path")


@pytest.mark.parametrize("behaviour", [_raises, lambda _: [], lambda _: [InferenceResponse()]])
def test_an_engine_model_that_does_not_answer_is_reported(
    behaviour: Callable[[InferenceRequest], list[InferenceResponse]],
) -> None:
    fake_pb_utils.bls_models[ENGINE_MODEL] = behaviour
    request = unary("abc")
    execute([request])
    (only,) = sends(request)
    assert only.error is not None and only.error.startswith("internal error: inflight_llm")
    assert "/secret/path" not in only.error


def test_the_stub_of_ensemble_sync_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from tests.fakes import fake_pb_utils\n"
        "sys.modules['triton_python_backend_utils'] = fake_pb_utils\n"
        "import inflight.tritonserver.sync\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
