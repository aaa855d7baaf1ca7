"""The shapes of a contract entry. Every dims is without the batch axis, as in a config.pbtxt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Dtype(Enum):
    """Triton's data types that the contract uses, with the numpy type behind each."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    INT32 = "INT32"
    INT64 = "INT64"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    FP16 = "FP16"
    FP32 = "FP32"
    STRING = "STRING"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of the array in a ``pb_utils.Tensor``; strings are objects (bytes)."""
        return _NUMPY[self]

    @property
    def is_integer(self) -> bool:
        return self.numpy.kind in "iu"

    @property
    def integer_bounds(self) -> tuple[int, int]:
        """Lowest and highest value; only for integer types."""
        bounds = np.iinfo(self.numpy)
        return int(bounds.min), int(bounds.max)


_NUMPY: dict[Dtype, np.dtype[Any]] = {
    Dtype.BOOL: np.dtype(np.bool_),
    Dtype.UINT8: np.dtype(np.uint8),
    Dtype.INT32: np.dtype(np.int32),
    Dtype.INT64: np.dtype(np.int64),
    Dtype.UINT32: np.dtype(np.uint32),
    Dtype.UINT64: np.dtype(np.uint64),
    Dtype.FP16: np.dtype(np.float16),
    Dtype.FP32: np.dtype(np.float32),
    Dtype.STRING: np.dtype(np.object_),
}

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A name that is known and not served.

    A request that carries it gets UnsupportedRequestError with ``reason``, unless every element of
    the value is one of ``neutral``: values that ask for nothing. No ``neutral``: always refused.
    """

    reason: str
    neutral: tuple[Scalar, ...] = ()
    least: int | None = None
    """Values below it make no sense anywhere, and get InvalidRequestError instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputField:
    """One fact that a client can state, under every name it may arrive by.

    ``field`` is its key in ``RawRequest.elements`` and its name in error texts.
    """

    field: str
    dtype: Dtype
    dims: tuple[int, ...] = (1,)
    text_names: tuple[str, ...] = ()
    """Inputs of ``ensemble``, ``ensemble_sync`` and ``inflight_llm``."""
    ids_names: tuple[str, ...] = ()
    """Further inputs of ``inflight_llm`` alone: the names of TensorRT-LLM's engine model."""
    parameter_names: tuple[str, ...] = ()
    """Further names that count when they arrive as a request parameter (camelCase as well)."""
    meaning: str
    range: str = ""
    default: str = ""
    equals: str = ""
    """The same thing elsewhere, where it has another name there."""
    refusal: Refusal | None = None

    @property
    def is_list(self) -> bool:
        """True where the value has several elements: a list in ``elements``, not a scalar."""
        return self.dims != (1,)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return self.text_names + self.ids_names


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputField:
    """One output tensor of ``inflight_llm``, and of the ensembles where ``on_ensemble``.

    A response speaks of one sequence. Its arrays have the batch axis in front (size 1) and then
    ``dims``, so a scalar is sent as [1, 1]; STRING outputs are sent 1-D, as [1] (``sent_rank``).
    """

    name: str
    dtype: Dtype
    dims: tuple[int, ...] = (1,)
    on_ensemble: bool = True
    meaning: str
    sent_when: str = "always"
    equals: str = ""

    @property
    def sent_rank(self) -> int:
        return 1 if self.dtype is Dtype.STRING else 1 + len(self.dims)

    def array(self, values: object) -> NDArray[Any]:
        """``values`` (a scalar or a flat sequence) as the array to send; str becomes UTF-8."""
        if self.dtype is Dtype.STRING:
            return np.array([str(values).encode("utf-8")], dtype=np.object_)
        flat = np.asarray(values, dtype=self.dtype.numpy).reshape(-1)
        return flat.reshape((1,) * (self.sent_rank - 1) + (flat.size,))

    def dummy(self) -> NDArray[Any]:
        """What stands for this output where the server needs one and there is nothing to say."""
        return self.array("" if self.dtype is Dtype.STRING else 0)
