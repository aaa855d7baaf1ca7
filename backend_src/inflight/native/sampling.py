"""NativeSampling: tokens for the rows of an iteration, in one call whatever their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.native.library import Int, NativeLibrary, Pointer

_ROW_RULES = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p_offset", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("wants_log_prob", np.int32),
        ("seed", np.uint64),
        ("uniform", np.float64),
    ],
    align=True,
)
"""RowRules of src/sampling.cpp."""


class NativeSampling:
    """``SamplingKernels`` of ``inflight.sampling`` in C++, over the thread team; their docstrings
    are the contract."""

    def __init__(self, library: NativeLibrary) -> None:
        self._likeliest = library.function(
            "inflight_likeliest", Pointer, Int, Pointer, Int, Pointer
        )
        self._uniforms = library.function("inflight_uniforms", Pointer, Int, Pointer, Int, Pointer)
        self._sample_rows = library.function(
            "inflight_sample_rows", Pointer, Int, Pointer, Int, Int, Pointer
        )

    def uniforms(
        self, seeds: npt.NDArray[np.uint64], sequence_index: int, positions: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.float64]:
        assert seeds.dtype == positions.dtype == np.uint64 and len(seeds) == len(positions)
        seeds, positions = np.ascontiguousarray(seeds), np.ascontiguousarray(positions)
        draws = np.empty(len(seeds), dtype=np.float64)
        self._uniforms(
            seeds.ctypes.data, sequence_index, positions.ctypes.data, len(seeds), draws.ctypes.data
        )
        return draws

    def likeliest(
        self, logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        _check(logits)
        assert rows.flags.c_contiguous and rows.dtype == np.int64
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
        self, logits: npt.NDArray[np.float32], rules: npt.NDArray[Any], *, normalize_log_probs: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        _check(logits)
        assert rules.dtype == _ROW_RULES and rules.flags.c_contiguous and len(rules) == len(logits)
        token_ids = np.zeros(len(logits), dtype=np.int32)
        log_probs, maxima = np.zeros((2, len(logits)), dtype=np.float32)
        # SampledRows of src/sampling.cpp.
        sampled = np.array([each.ctypes.data for each in (token_ids, log_probs, maxima)])
        self._sample_rows(
            logits.ctypes.data,
            logits.shape[1],
            rules.ctypes.data,
            len(logits),
            normalize_log_probs,
            sampled.ctypes.data,
        )
        return token_ids, log_probs, maxima


def _check(logits: npt.NDArray[np.float32]) -> None:
    assert logits.flags.c_contiguous and logits.dtype == np.float32
