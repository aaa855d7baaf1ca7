"""What preprocessing and postprocessing share: each request gets its own answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inflight.errors import RequestError, RequestFailedError
from inflight.tritonserver.contract.models import Declared
from inflight.tritonserver.responses import error_response

logger = logging.getLogger(__name__)

Outputs = Iterable[tuple[Declared, NDArray[Any]]]


def answer_each(pb_requests: Sequence[Any], outputs_of: Callable[[Any], Outputs]) -> list[Any]:
    """One ``InferenceResponse`` for each request, in their order; never raises.

    ``outputs_of`` gives a request's outputs or raises; its RequestError is that request's answer,
    anything else is logged and answered without its text, which could hold a prompt or a path.
    """
    return [_answer(pb_request, outputs_of) for pb_request in pb_requests]


def _answer(pb_request: Any, outputs_of: Callable[[Any], Outputs]) -> Any:
    try:
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(declared.name, array) for declared, array in outputs_of(pb_request)]
        )
    except RequestError as error:
        return error_response(error)
    except Exception as error:
        logger.error("a request failed", exc_info=error)
        return error_response(RequestFailedError("the server failed while it read this request"))
