"""Request parameters, and vLLM's ``sampling_parameters``, as values of fields of the contract.

A JSON key that is no input of the model reaches us as a request parameter. Those that the contract
knows count like the input of that name; all others are tolerated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.tritonserver.contract import Dtype, InputField, field_of_parameter, vllm
from inflight.tritonserver.limits import NO_END_ID
from inflight.tritonserver.tensors import MAX_LIST_STRINGS, Value, check_neutral, text

MAX_SAMPLING_PARAMETERS_CHARS = 65_536
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def parameter_fields(parameters: str) -> dict[str, tuple[str, Value]]:
    """``pb_request.parameters()`` as {parameter's name: (field, value)}, without unknown names.

    Raises InvalidRequestError for a value that is not of the field's type, and
    UnsupportedRequestError for a field that is not served and asks for something.
    """
    found = {}
    for name, raw in json.loads(parameters or "{}").items():
        entry = field_of_parameter(name)
        if entry is None:
            continue
        if entry.refusal is not None:
            check_neutral(entry.refusal, name, _neutral_form(entry, raw))
            continue
        found[name] = (entry.field, _value(entry, name, raw))
    return found


def sampling_parameter_fields(sampling_parameters: str) -> dict[str, tuple[str, Any]]:
    """vLLM's JSON object as {key: (field, value)}; null is unset.

    ``stop_token_ids`` (a list of int) and ``logit_bias`` ({id: bias}) are fields of their own here.
    Raises as ``parameter_fields``, and for a key that nobody knows.
    """
    found = {}
    for key, raw in _object("sampling_parameters", sampling_parameters).items():
        if raw is None:
            continue
        entry = field_of_parameter(key)
        if key in vllm.REFUSED:
            check_neutral(vllm.REFUSED[key], key, _from_string(raw))
        elif entry is not None and entry.refusal is not None:
            check_neutral(entry.refusal, key, _neutral_form(entry, raw))
        else:
            field, value = _sampling_field(key, raw)
            if value is not None:
                found[key] = (field, value)
    return found


def _sampling_field(key: str, raw: Any) -> tuple[str, Any]:
    """The field that ``key`` states and its value; None: unset."""
    field = vllm.RENAMED[key].field if key in vllm.RENAMED else key
    entry = field_of_parameter(field)
    if entry is not None:
        field = entry.field
    if field not in vllm.FIELDS:
        raise InvalidRequestError("sampling_parameters", key, "is not a sampling parameter")
    if key in _OWN_RULES:
        return field, _OWN_RULES[key](key, raw)
    assert entry is not None, f"{field} is no field of the contract"
    return field, _value(entry, key, raw)


def truth(name: str, raw: object) -> bool:
    """A BOOL as JSON may spell it: true, 1, "true"; raises InvalidRequestError."""
    known = _TRUTH.get(str(raw).lower())
    if known is None:
        raise InvalidRequestError(name, raw, "must be true or false")
    return known


def _object(name: str, source: str) -> Mapping[str, Any]:
    if len(source) > MAX_SAMPLING_PARAMETERS_CHARS:
        raise InvalidRequestError(
            name,
            f"{len(source)} characters",
            f"are too many: at most {MAX_SAMPLING_PARAMETERS_CHARS} are allowed",
        )
    try:
        loaded = json.loads(source or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequestError(name, source, "is not valid JSON") from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError(name, source, "must be a JSON object")
    return loaded


def _value(entry: InputField, name: str, raw: object) -> Value:
    """``raw``, a JSON value, as the field's type."""
    if entry.dtype is Dtype.STRING:
        return _strings(name, raw) if entry.is_list else _string(name, raw)
    if entry.is_list:
        raise InvalidRequestError(name, raw, "must be sent as an input tensor")
    if entry.dtype is Dtype.BOOL:
        return truth(name, raw)
    number = _number(name, raw)
    return _integer(entry.dtype, name, number) if entry.dtype.is_integer else float(number)


def _neutral_form(entry: InputField, raw: object) -> object:
    """``raw`` as the field's type if it is one of that type, to be compared with neutral values."""
    try:
        return _value(entry, entry.field, raw)
    except InvalidRequestError:
        return raw


def _string(name: str, raw: object) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise InvalidRequestError(name, raw, "must be a string")
    return text(name, str(raw))


def _strings(name: str, raw: object) -> list[str]:
    words = raw if isinstance(raw, list) else [raw]
    if len(words) > MAX_LIST_STRINGS:
        raise InvalidRequestError(
            name, f"{len(words)} values", f"are too many: at most {MAX_LIST_STRINGS} are allowed"
        )
    return [_string(name, word) for word in words]


def _from_string(raw: Any) -> Any:
    """The number or truth value that a string spells; anything else as it is."""
    if isinstance(raw, str):
        try:
            return json.loads(raw.lower())
        except (ValueError, RecursionError):
            return raw
    return raw


def _number(name: str, raw: object) -> int | float:
    number = _from_string(raw)
    if isinstance(number, bool) or not isinstance(number, int | float) or not _finite(number):
        raise InvalidRequestError(name, raw, "must be a number")
    return number


def _finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond every float
        return False


def _integer(dtype: Dtype, name: str, number: int | float) -> int:
    if number != int(number):
        raise InvalidRequestError(name, number, "must be a whole number")
    low, high = dtype.integer_bounds
    if not low <= number <= high:
        raise InvalidRequestError(name, int(number), f"must be between {low} and {high}")
    return int(number)


def _ids(name: str, raw: object) -> list[int]:
    if not isinstance(raw, list) or len(raw) > MAX_LIST_STRINGS:
        raise InvalidRequestError(
            name, raw, f"must be a list of at most {MAX_LIST_STRINGS} token ids"
        )
    return [_integer(Dtype.INT32, name, _number(name, value)) for value in raw]


def _biases(name: str, raw: object) -> dict[int, float]:
    if not isinstance(raw, dict) or len(raw) > MAX_LIST_STRINGS:
        raise InvalidRequestError(
            name, raw, f"must be an object of at most {MAX_LIST_STRINGS} token ids"
        )
    ids = _ids(name, list(raw))
    return {i: float(_number(name, bias)) for i, bias in zip(ids, raw.values(), strict=True)}


def _no_end_id(name: str, raw: object) -> int | None:
    return NO_END_ID if truth(name, raw) else None


def _top_k(name: str, raw: object) -> int | None:
    value = _integer(Dtype.INT32, name, _number(name, raw))
    return None if value == -1 else value


_OWN_RULES: Mapping[str, Callable[[str, object], Any]] = {
    "ignore_eos": _no_end_id,
    "stop_token_ids": _ids,
    "logit_bias": _biases,
    "top_k": _top_k,
}
"""vLLM's key -> how its value becomes the field's; None is unset."""
