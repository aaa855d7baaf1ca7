"""Triton requests as clients send them, from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inflight.api.config import InflightConfig
from inflight.api.request import Request
from inflight.tritonserver.contract import Dtype, field_of_tensor
from inflight.tritonserver.parsed import ParsedRequest
from inflight.tritonserver.requests import build_requests, read_request
from tests.fakes import fake_pb_utils
from tests.fakes.tokenizers import make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOKENIZER = make_tokenizer("byte_level", TEMPLATE)


def tensor(name: str, value: Any, *, batch: bool = False) -> fake_pb_utils.Tensor:
    """An input of the contract; ``batch``: ``value`` is a list with an entry for each element."""
    entry = field_of_tensor(name)
    assert entry is not None, name
    elements = value if batch else [value]
    if entry.dtype is Dtype.STRING:
        rows = [each if isinstance(each, list) else [each] for each in elements]
        coded = [[word.encode() if isinstance(word, str) else word for word in row] for row in rows]
        array = np.array(coded, dtype=np.object_)
    else:
        array = np.array(elements, dtype=entry.dtype.numpy)
        if array.ndim < 1 + len(entry.dims):
            array = array.reshape((len(elements),) + (1,) * (len(entry.dims) - 1) + (-1,))
    return fake_pb_utils.Tensor(name, array)


def asking(
    *,
    request_id: str = "",
    timeout: int = 0,
    parameters: dict[str, Any] | None = None,
    batch: bool = False,
    requested_output_names: Sequence[str] = (),
    **inputs: Any,
) -> fake_pb_utils.InferenceRequest:
    """``inputs``: tensor name -> value, for one prompt or (``batch``) a list for several."""
    return fake_pb_utils.InferenceRequest(
        inputs=[tensor(name, value, batch=batch) for name, value in inputs.items()],
        request_id=request_id,
        timeout=timeout,
        parameters=parameters,
        requested_output_names=requested_output_names,
    )


def parsed(
    pb_request: fake_pb_utils.InferenceRequest, config: InflightConfig | None = None
) -> ParsedRequest:
    return build_requests(read_request(pb_request), TOKENIZER, config or InflightConfig())


def built(config: InflightConfig | None = None, **asked: Any) -> Request:
    """The one Request of a request for one prompt, which is "a b" unless asked otherwise."""
    if not {"text_input", "messages", "input_ids"} & asked.keys():
        asked["text_input"] = "a b"
    (request,) = parsed(asking(**asked), config).requests
    return request
