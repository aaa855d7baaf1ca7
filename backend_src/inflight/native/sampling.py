"""NativeSampling: tokens for the rows of an iteration, in two calls whatever their number."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.native.library import Int, NativeLibrary, Pointer


class _LogProb(IntEnum):
    """The numbers are those of src/sampling.cpp."""

    NONE = 0
    OF_ALL = 1
    OF_SURVIVORS = 2


_RULES = ("top_k", "temperature", "top_p", "min_p_offset", "uniform")
_SAMPLED_ROW = np.dtype(
    [
        ("row", np.int64),
        ("token_id", np.int64),
        ("top_k", np.int64),
        ("log_prob_kind", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p_offset", np.float64),
        ("uniform", np.float64),
        ("log_prob", np.float64),
    ]
)
"""SampledRow of src/sampling.cpp."""


class NativeSampling:
    """``SamplingKernels`` of ``inflight.sampling`` in C++, over the thread team; their docstrings
    are the contract."""

    def __init__(self, library: NativeLibrary) -> None:
        self._likeliest = library.function(
            "inflight_likeliest", Pointer, Int, Pointer, Int, Pointer
        )
        self._sample_rows = library.function("inflight_sample_rows", Pointer, Int, Pointer, Int)

    def likeliest(
        self, logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        _check(logits, rows)
        token_ids = np.empty(len(rows), dtype=np.int32)
        self._likeliest(
            logits.ctypes.data,
            logits.shape[1],
            rows.ctypes.data,
            len(rows),
            token_ids.ctypes.data,
        )
        return token_ids

    def sample_rows(
        self,
        logits: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        likeliest: npt.NDArray[np.int32],
        rules: npt.NDArray[Any],
        *,
        normalize_log_probs: bool,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        _check(logits, rows)
        assert len(rows) == len(likeliest) == len(rules)
        sampled = np.empty(len(rows), dtype=_SAMPLED_ROW)
        sampled["row"] = rows
        sampled["token_id"] = likeliest
        for name in _RULES:
            sampled[name] = rules[name]
        wanted = _LogProb.OF_SURVIVORS if normalize_log_probs else _LogProb.OF_ALL
        sampled["log_prob_kind"] = np.where(rules["wants_log_prob"], wanted, _LogProb.NONE)
        self._sample_rows(logits.ctypes.data, logits.shape[1], sampled.ctypes.data, len(rows))
        return sampled["token_id"].astype(np.int32), sampled["log_prob"].astype(np.float32)


def _check(logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]) -> None:
    assert logits.flags.c_contiguous and logits.dtype == np.float32
    assert rows.flags.c_contiguous and rows.dtype == np.int64
