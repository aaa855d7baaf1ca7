"""From a Triton request to the engine's Requests, in two steps.

``read_request`` runs inside ``execute`` and touches the server's objects; ``build_requests`` runs
in a pool and tokenizes. Both raise RequestError subclasses and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inflight.api.config import InflightConfig
from inflight.api.request import OutputConfig, Request, SamplingConfig
from inflight.errors import InvalidRequestError, UnsupportedRequestError
from inflight.text.tokenizer import Tokenizer
from inflight.tritonserver.contract import field_of_tensor
from inflight.tritonserver.limits import end_ids, max_tokens, time_limit_ms
from inflight.tritonserver.parameters import parameter_fields, sampling_parameter_fields
from inflight.tritonserver.parsed import Door, ParsedRequest, RawRequest, Wants
from inflight.tritonserver.prompts import prompt_ids
from inflight.tritonserver.retention import retention_config
from inflight.tritonserver.tensors import batch_size, refuse, rows, same_as_fp32
from inflight.tritonserver.words import (
    bad_word_sequences,
    logit_bias,
    real_words,
    stop_token_sequences,
)

Element = dict[str, Any]

_SHORTEST = "timeout_us"
"""The one field of which several values make sense together: the shortest counts."""

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Fields that SamplingConfig has under the same name."""


def read_request(pb_request: Any) -> RawRequest:
    """The fields of a ``pb_utils.InferenceRequest`` under their canonical names."""
    request_id = str(pb_request.request_id())
    requested_outputs = frozenset(pb_request.requested_output_names())
    parameters = parameter_fields(pb_request.parameters())
    tensors = {tensor.name(): tensor.as_numpy() for tensor in pb_request.inputs()}
    if _is_stop(tensors, parameters):
        return RawRequest(
            triton_request_id=request_id,
            door=None,
            stop=True,
            streaming=False,
            elements=(),
            wants=Wants(),
            requested_outputs=requested_outputs,
        )
    elements = _elements(tensors)
    for element in elements:
        for name, (field, value) in parameters.items():
            _state(element, field, value, name)
        if pb_request.timeout() > 0:
            _state(element, _SHORTEST, int(pb_request.timeout()), "timeout")
    return RawRequest(
        triton_request_id=request_id,
        door=_door(elements),
        stop=False,
        streaming=_for_all(elements, "stream"),
        elements=tuple(elements),
        wants=Wants(
            log_probs=_for_all(elements, "return_log_probs"),
            perf_metrics=_for_all(elements, "return_perf_metrics"),
            num_input_tokens=_for_all(elements, "return_num_input_tokens"),
            num_output_tokens=_for_all(elements, "return_num_output_tokens"),
        ),
        requested_outputs=requested_outputs,
    )


def build_requests(
    raw: RawRequest, tokenizer: Tokenizer | None, config: InflightConfig
) -> ParsedRequest:
    """One Request for each batch element of ``raw``, which is no stop request.

    ``config``: its max_seq_len, where it is set, also bounds the max_tokens of a request that
    names none.
    """
    assert raw.door is not None, "a stop request has nothing to build"
    requests = []
    for index, element in enumerate(raw.elements):
        client_id = raw.triton_request_id or None
        if client_id is not None and len(raw.elements) > 1:
            client_id = f"{client_id}[{index}]"
        fields = _with_sampling_parameters(element)
        requests.append(_build(fields, raw, client_id, tokenizer, config))
    return ParsedRequest(
        triton_request_id=raw.triton_request_id,
        door=raw.door,
        streaming=raw.streaming,
        requests=tuple(requests),
        wants=raw.wants,
    )


def _is_stop(tensors: Mapping[str, Any], parameters: Mapping[str, tuple[str, Any]]) -> bool:
    stop = tensors.get("stop")
    if stop is not None:
        return bool(np.any(stop))
    return any(field == "stop" and value for field, value in parameters.values())


def _elements(tensors: Mapping[str, Any]) -> list[Element]:
    size = next((batch_size(name, array) for name, array in tensors.items()), 1)
    elements: list[Element] = [{} for _ in range(size)]
    for name, array in tensors.items():
        entry = field_of_tensor(name)
        if entry is None:
            raise UnsupportedRequestError(name, "there is no such input")
        if entry.refusal is not None:
            refuse(entry.refusal, name, array)
            continue
        for element, value in zip(elements, rows(entry, name, array, size), strict=True):
            _state(element, entry.field, value, name)
    return elements


def _state(element: Element, field: str, value: Any, name: str) -> None:
    """``element[field] = value``; a field stated twice must be stated equally.

    ``name``: what the client called it.
    """
    if field not in element:
        element[field] = value
    elif field == _SHORTEST:
        element[field] = min(element[field], value)
    elif not _are_equal(element[field], value):
        raise InvalidRequestError(
            name, value, f"contradicts another value of {field} in this request: send one"
        )


def _are_equal(one: Any, other: Any) -> bool:
    """As a client means it: 0.7 as FP32 and 0.7 as a JSON number are the same."""
    if isinstance(one, float) and isinstance(other, float):
        return same_as_fp32(one, other)
    return np.array_equal(one, other)


def _door(elements: list[Element]) -> Door:
    doors = {Door.IDS if "input_ids" in element else Door.TEXT for element in elements}
    (door,) = doors  # all elements have the same tensors
    for name in ("text_input", "messages"):
        if door is Door.IDS and elements[0].get(name):
            raise InvalidRequestError(name, "...", "and input_ids are both given: send one of them")
    return door


def _for_all(elements: list[Element], field: str) -> bool:
    values = {bool(element.get(field, False)) for element in elements}
    if len(values) > 1:
        raise InvalidRequestError(field, sorted(values), "must be the same for the whole batch")
    return values.pop()


def _with_sampling_parameters(element: Mapping[str, Any]) -> Element:
    fields = dict(element)
    for name, (field, value) in sampling_parameter_fields(
        fields.pop("sampling_parameters", "")
    ).items():
        _state(fields, field, value, name)
    return fields


def _build(
    fields: Element,
    raw: RawRequest,
    client_id: str | None,
    tokenizer: Tokenizer | None,
    config: InflightConfig,
) -> Request:
    input_token_ids = prompt_ids(fields, tokenizer, config.max_input_chars)
    stop_words = real_words(fields.get("stop_words", ()))
    if stop_words and tokenizer is None:
        raise UnsupportedRequestError(
            "stop_words", "the checkpoint has no tokenizer: send stop_words_list"
        )
    return Request(
        input_token_ids=input_token_ids,
        max_tokens=max_tokens(fields, len(input_token_ids), config),
        streaming=raw.streaming,
        sampling_config=_sampling_config(fields),
        output_config=OutputConfig(
            return_log_probs=raw.wants.log_probs,
            return_perf_metrics=raw.wants.perf_metrics,
            exclude_input_from_output=bool(
                fields.get("exclude_input_in_output", config.exclude_input_in_output)
            ),
        ),
        end_ids=end_ids(fields, tokenizer),
        stop_words=stop_words,
        stop_token_sequences=stop_token_sequences(fields),
        bad_words=bad_word_sequences(fields, tokenizer),
        logit_bias=logit_bias(fields, tokenizer),
        priority=fields.get("priority", 0.5),
        client_id=client_id,
        cache_salt=fields.get("cache_salt") or None,
        kv_cache_retention_config=retention_config(fields),
        allotted_time_ms=time_limit_ms(fields),
    )


def _sampling_config(fields: Mapping[str, Any]) -> SamplingConfig:
    return SamplingConfig(**{name: fields[name] for name in _SAMPLING if name in fields})
