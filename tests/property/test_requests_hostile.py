"""Whatever a client sends, it is served or it gets a RequestError: nothing else comes out."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.errors import RequestError
from inflight.tritonserver.contract import INPUTS, Dtype, vllm
from tests.fakes import fake_pb_utils
from tests.unit.tritonserver.asking import asking, built, parsed

NAMES = sorted(
    {name for entry in INPUTS for name in (*entry.tensor_names, *entry.parameter_names)}
    | {*vllm.RENAMED, *vllm.REFUSED, "unknown"}
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["nan", "-1", "1e999", "true", "9" * 400, "\ud800", "[" * 5000])
)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=4), scalars)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), scalars, max_size=4))
@example({"len_penalty": 3.4028235677973366e38})  # beyond FP32
def test_parameters(parameters: dict[str, Any]) -> None:
    parameters.pop("stop", None)  # a stop request has nothing to build
    with contextlib.suppress(RequestError):
        assert parsed(asking(text_input="a", parameters=parameters)).requests


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=4) | values)
def test_sampling_parameters(sampling_parameters: Any) -> None:
    with contextlib.suppress(RequestError):
        assert built(sampling_parameters=json.dumps(sampling_parameters)).max_tokens > 0


@st.composite
def tensors(draw: st.DrawFn) -> list[fake_pb_utils.Tensor]:
    entries = draw(st.lists(st.sampled_from(INPUTS), max_size=4, unique_by=lambda e: e.field))
    drawn = []
    for entry in entries:
        if not entry.tensor_names or entry.field == "stop":
            continue
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        if draw(st.booleans()):
            shape = [1, *(draw(st.integers(0, 3)) if size < 0 else size for size in entry.dims)]
        size = int(np.prod(shape))
        if entry.dtype is Dtype.STRING:
            flat = draw(st.lists(st.binary(max_size=6), min_size=size, max_size=size))
            array = np.array([*flat, None], dtype=object)[:-1].reshape(shape)
        else:
            width = entry.dtype.numpy.itemsize * size
            array = np.frombuffer(
                draw(st.binary(min_size=width, max_size=width)), entry.dtype.numpy
            ).reshape(shape)
        drawn.append(fake_pb_utils.Tensor(draw(st.sampled_from(entry.tensor_names)), array))
    return drawn


@settings(max_examples=250, deadline=None)
@given(tensors())
def test_tensors(drawn: list[fake_pb_utils.Tensor]) -> None:
    with contextlib.suppress(RequestError):
        assert parsed(fake_pb_utils.InferenceRequest(inputs=drawn)).requests
