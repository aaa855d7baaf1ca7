"""RecordedCalls: native calls written down once and made in one call from then on.

A call from Python takes 3 microseconds, most of them for looking at tensors, and an iteration makes
two hundred, between which the thread team waits: a third of the time of a small model in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from inflight.native.library import Float, Int, NativeLibrary, Pointer


class _Recordable(NamedTuple):
    number: int
    """That of src/recorded.cpp."""
    place_of_rows: int | None
    """Which argument is the number of rows; None: they were planned before."""


_RECORDABLE = {
    "inflight_norm": _Recordable(0, 4),
    "inflight_copy": _Recordable(1, 2),
    "inflight_activate": _Recordable(2, 1),
    "inflight_linear": _Recordable(3, 2),
    "inflight_attention_attend": _Recordable(4, None),
}

_CALL = np.dtype([("function", np.int64), ("arguments", np.int64, 9)])
"""RecordedCall of src/recorded.cpp."""


class CallRecorder:
    """A FunctionSource whose functions compute nothing: a call of one is written down. All calls
    are for the same number of rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.calls: list[tuple[_Recordable, list[int]]] = []

    def function(self, name: str, *types: Any, result: Any = None) -> Callable[..., Any]:
        """One that cannot be recorded fails when it is called."""

        def record(*arguments: Any) -> None:
            assert name in _RECORDABLE, f"{name} cannot be recorded"
            values = [_as_int(*each) for each in zip(types, arguments, strict=True)]
            place = _RECORDABLE[name].place_of_rows
            assert place is None or values[place] == self.num_rows
            self.calls.append((_RECORDABLE[name], values))

        return record


class RecordedCalls:
    """Whatever the calls were given has to live as long, at the same addresses."""

    def __init__(self, library: NativeLibrary, recorder: CallRecorder) -> None:
        self._make = library.function("inflight_make_calls", Pointer, Int)
        self._calls = np.zeros(len(recorder.calls), dtype=_CALL)
        for call, (recordable, values) in zip(self._calls, recorder.calls, strict=True):
            call["function"] = recordable.number
            call["arguments"][: len(values)] = values
        self._address = self._calls.ctypes.data
        self._num_rows = recorder.num_rows
        places = [recordable.place_of_rows for recordable, _ in recorder.calls]
        self._with_rows = np.array([i for i, place in enumerate(places) if place is not None])
        self._places = np.array([place for place in places if place is not None])

    def make(self, num_rows: int, num_calls: int | None = None) -> None:
        """The first ``num_calls`` (None: all), in their order, for so many rows."""
        if num_rows != self._num_rows:
            self._calls["arguments"][self._with_rows, self._places] = num_rows
            self._num_rows = num_rows
        self._make(self._address, len(self._calls) if num_calls is None else num_calls)


def _as_int(kind: Any, argument: Any) -> int:
    """What lies in the eight bytes of an argument; of a float it is the first four."""
    if kind is Float:
        return int(np.array([argument, 0], dtype=np.float32).view(np.int64)[0])
    assert kind in (Int, Pointer)
    return int(argument or 0)
