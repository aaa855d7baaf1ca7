"""SyncService: ``ensemble_sync``, the same answers for clients that cannot stream."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from inflight.errors import InvalidRequestError, RequestFailedError
from inflight.tritonserver.contract import field_of_parameter
from inflight.tritonserver.orphan import exit_when_orphaned
from inflight.tritonserver.parameters import truth
from inflight.tritonserver.reply import Reply
from inflight.tritonserver.responses import error_of, error_response

logger = logging.getLogger(__name__)

ENGINE_MODEL = "inflight_llm"
MAX_CALLS = 256
"""Requests that are with the engine model at once; each keeps a thread waiting. More queue up."""
_STOP_THREADS = 4
WATCH_SECONDS = 0.2
"""How often it is looked whether a waiting request's client has gone; each look is IPC."""


class SyncService:
    """Passes each request on to the text door of ``inflight_llm`` and answers it when that has.

    ``execute`` does not wait for the answers: they go out through the requests' response senders,
    each when it is there. So a short request never waits for a long one that Triton's batcher put
    beside it or before it. A client that has gone is noticed while its request waits; a ``stop``
    request with the same id ends it, because a call from model to model cannot be cancelled.
    """

    def __init__(self) -> None:
        exit_when_orphaned()
        self._calls = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="inflight-call")
        self._stops = ThreadPoolExecutor(_STOP_THREADS, thread_name_prefix="inflight-stop")
        self._tasks: set[asyncio.Task[None]] = set()
        # Of calls that have ended, until the stub has forgotten these too: see _let_go.
        self._ended: deque[list[Any]] = deque(maxlen=MAX_CALLS)

    async def execute(self, pb_requests: Sequence[Any]) -> None:
        """Takes the requests and returns at once. Each gets one response with FINAL. Never raises.

        Triton keeps the event loop running between calls.
        """
        for pb_request in pb_requests:
            reply = Reply(pb_request.get_response_sender())
            task = asyncio.create_task(self._answer(pb_request, reply))
            self._tasks.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Waits until everything taken so far has been answered."""
        await asyncio.gather(*self._tasks)

    async def _answer(self, pb_request: Any, reply: Reply) -> None:
        try:
            response = await self._response(pb_request)
        except InvalidRequestError as error:
            response = error_response(error)
        except Exception as error:  # the server's own exceptions: the engine model is not there
            logger.error("a call to %s failed", ENGINE_MODEL, exc_info=error)
            response = error_response(RequestFailedError(f"{ENGINE_MODEL} did not answer"))
        reply.finish(response)

    async def _response(self, pb_request: Any) -> Any:
        if name := _asked(pb_request, "stream"):
            # Only pieces would arrive, as if they were the answers of a batch.
            raise InvalidRequestError(
                name, True, "is not possible on ensemble_sync: use ensemble or inflight_llm"
            )
        request_id = pb_request.request_id()
        if not request_id and not _asked(pb_request, "stop"):
            request_id = uuid.uuid4().hex
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._calls, _exec, _forwarded(pb_request, request_id))
        while not (await asyncio.wait({call}, timeout=WATCH_SECONDS))[0]:
            # Once more each time: a stop that overtakes its request finds nothing to stop.
            if pb_request.is_cancelled():
                stop = loop.run_in_executor(self._stops, _exec, _stop_request(request_id))
                self._ended.append(await stop)
        self._ended.append(call.result())
        response = _combined(call.result(), pb_request.requested_output_names())
        self._let_go(pb_request)
        return response

    def _let_go(self, pb_request: Any) -> None:
        """Drops the responses of calls that have ended, when that is safe.

        A thread of the stub forgets a call some time after its last response. Before release 24.12
        it frees what only it still holds without the interpreter's lock, which ends the process on
        Python 3.12 and later (see ``tritonserver.responses``). So we must be the last to let go.
        That thread works in order, and it also looks up cancellations. Only True is remembered from
        an earlier look, so with an answer of False it has forgotten all calls that ended before.
        """
        if not pb_request.is_cancelled():
            self._ended.clear()


def _exec(pb_request: Any) -> list[Any]:
    """All responses of a call to a decoupled model; blocks until the last one."""
    return list(pb_request.exec(decoupled=True))


def _asked(pb_request: Any, field: str) -> str:
    """The name by which the request asks for ``field``, a BOOL; "" where it does not.

    Raises InvalidRequestError for a parameter that is no BOOL; all others are the engine model's to
    judge.
    """
    tensor = pb_utils.get_input_tensor_by_name(pb_request, field)
    if tensor is not None and tensor.as_numpy().any():
        return field
    parameters: dict[str, object] = json.loads(pb_request.parameters() or "{}")
    for name, value in parameters.items():
        entry = field_of_parameter(name)
        if entry is not None and entry.field == field and truth(name, value):
            return name
    return ""


def _forwarded(pb_request: Any, request_id: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=ENGINE_MODEL,
        request_id=request_id,
        inputs=pb_request.inputs(),
        # batch_index puts the answers of a batch in order, whether or not the client wants it.
        requested_output_names=[*{*pb_request.requested_output_names(), "batch_index"}],
        timeout=pb_request.timeout(),
        parameters=_parameters(pb_request),
    )


def _parameters(pb_request: Any) -> dict[str, Any]:
    """The request's parameters. A call between models takes no floats; as text they are read."""
    parameters = json.loads(pb_request.parameters() or "{}")
    return {
        name: str(value) if isinstance(value, float) else value
        for name, value in parameters.items()
    }


def _stop_request(request_id: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=ENGINE_MODEL,
        request_id=request_id,
        inputs=[pb_utils.Tensor("stop", np.array([[True]]))],
        requested_output_names=["text_output"],
    )


def _combined(responses: Sequence[Any], requested_outputs: Sequence[str]) -> Any:
    """One response of the responses to the prompts of a batch (usually one), in batch order.

    It holds nothing that was not requested; ``tritonserver.responses`` says why.
    """
    for response in responses:
        if response.has_error():
            return error_of(response.error().message())
    outputs = [
        {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        for response in responses
        if response.output_tensors()
    ]
    if not outputs:
        return error_response(RequestFailedError(f"{ENGINE_MODEL} sent no data"))
    if len(outputs) > 1:
        outputs.sort(key=lambda each: int(each["batch_index"].item()))
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor(name, _stacked([each[name] for each in outputs]))
            for name in outputs[0]
            if name in requested_outputs
        ]
    )


def _stacked(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The arrays one below the other on their batch axis; other axes are padded with zeros."""
    if len(arrays) == 1:
        return arrays[0]
    widths = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    stacked = np.zeros((sum(len(array) for array in arrays), *widths), dtype=arrays[0].dtype)
    row = 0
    for array in arrays:
        rows = slice(row, row + len(array))
        place = (rows, *(slice(size) for size in array.shape[1:]))
        stacked[place] = array
        row = rows.stop
    return stacked
