"""Input tensors in plain Python, with bounds. Whatever arrives, only RequestError leaves.

Arrays are copied: the server takes the memory of a request back when ``execute`` returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.errors import InvalidRequestError, UnsupportedRequestError
from inflight.tritonserver.contract import MAX_BATCH_SIZE, Dtype, InputField, Refusal

MAX_LIST_STRINGS = 1024
"""Strings in one list, such as bad_words."""
MAX_LIST_NUMBERS = 1 << 21
"""Numbers in one list, such as input_ids or embedding_bias."""
MAX_STRING_BYTES = 1 << 26
"""A string longer than this is refused before it is decoded."""

Value = bool | int | float | str | list[str] | NDArray[Any]


def batch_size(name: str, array: NDArray[Any]) -> int:
    """The number of batch elements: the length of the first axis, 1 to MAX_BATCH_SIZE."""
    if array.ndim < 1 or not 1 <= array.shape[0] <= MAX_BATCH_SIZE:
        raise InvalidRequestError(
            name, list(array.shape), f"must have a batch axis of 1 to {MAX_BATCH_SIZE}"
        )
    return int(array.shape[0])


def rows(entry: InputField, name: str, array: NDArray[Any], size: int) -> list[Value]:
    """The value of ``entry`` for each of the ``size`` batch elements.

    ``array``: [size, *dims] of ``entry``. A value is a Python scalar where dims is [1], else a
    list of str, or a numpy array of the dims. Raises InvalidRequestError that names ``name``.
    """
    _check_array(entry, name, array, size)
    if not entry.is_list:
        return [_plain(name, value) for value in array.reshape(-1)]
    if entry.dtype is Dtype.STRING:
        return [[text(name, word) for word in row] for row in array]
    return [np.array(row) for row in array]


def refuse(refusal: Refusal, name: str, array: NDArray[Any]) -> None:
    """Raises unless the tensor of a field that is not served asks for nothing."""
    if array.size > MAX_LIST_STRINGS:
        raise UnsupportedRequestError(name, refusal.reason)
    for value in array.reshape(-1):
        check_neutral(refusal, name, _plain(name, value))


def check_neutral(refusal: Refusal, name: str, value: object) -> None:
    """Raises unless ``value`` is a neutral one of a field that is not served."""
    if refusal.least is not None and isinstance(value, int) and value < refusal.least:
        raise InvalidRequestError(name, value, f"must be {refusal.least} or larger")
    if not any(_same(value, neutral) for neutral in refusal.neutral):
        raise UnsupportedRequestError(name, refusal.reason)


def text(name: str, value: bytes | str) -> str:
    """``value`` as a str that is Unicode; raises InvalidRequestError."""
    if len(value) > MAX_STRING_BYTES:
        raise InvalidRequestError(
            name, f"{len(value)} bytes", f"are too many: at most {MAX_STRING_BYTES} are allowed"
        )
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8")
        value.encode("utf-8")  # JSON can spell half of a surrogate pair
        return value
    except UnicodeError:
        raise InvalidRequestError(name, "...", "is not valid UTF-8") from None


def _check_array(entry: InputField, name: str, array: NDArray[Any], size: int) -> None:
    expected = (size, *entry.dims)
    if array.ndim != len(expected) or any(
        have != want for have, want in zip(array.shape, expected, strict=True) if want >= 0
    ):
        raise InvalidRequestError(name, list(array.shape), f"must have the shape {list(expected)}")
    if (array.dtype.kind in "OS") != (entry.dtype is Dtype.STRING):
        raise InvalidRequestError(name, str(array.dtype), f"must be of type {entry.dtype.value}")
    limit = MAX_LIST_STRINGS if entry.dtype is Dtype.STRING else MAX_LIST_NUMBERS
    if array.size > limit * size:
        raise InvalidRequestError(
            name, f"{array.size // size} values", f"are too many: at most {limit} are allowed"
        )


def same_as_fp32(one: float, other: float) -> bool:
    """Are they the same FP32 number? A client's FP32 1e-6 is not Python's 1e-6."""
    with np.errstate(over="ignore"):  # what is beyond FP32 is infinite
        return bool(np.float32(one) == np.float32(other))


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, float) and isinstance(neutral, float):
        return same_as_fp32(value, neutral)
    return value == neutral


def _plain(name: str, value: Any) -> bool | int | float | str:
    """A numpy scalar, or the bytes of a string, as the Python value."""
    if isinstance(value, bytes | str):
        return text(name, value)
    plain: bool | int | float = value.item()
    return plain
