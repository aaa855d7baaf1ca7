"""NativeSampling: the heavy steps of the sampler, over whole rows of logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inflight.native.library import Double, Float, Int, NativeLibrary, Pointer

Floats = npt.NDArray[np.float32]


class NativeSampling:
    """``SamplingKernels`` of ``inflight.sampling`` in C++; their docstrings are the contract.

    Used by one thread: what a call returns lies in buffers that the next one overwrites.
    """

    def __init__(self, library: NativeLibrary, vocab_size: int) -> None:
        self._survivors = library.function(
            "inflight_survivors",
            *[Pointer, Int, Int, Float, Float, Float, Float, Pointer, Pointer],
            result=Int,
        )
        self._pick = library.function("inflight_pick", Pointer, Int, Double, result=Int)
        self._ids = np.empty(vocab_size, dtype=np.int64)
        self._weights = np.empty(vocab_size, dtype=np.float32)

    def survivors(
        self,
        row: Floats,
        peak: float,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p_logit: float | None = None,
    ) -> tuple[npt.NDArray[np.int64] | None, Floats]:
        assert len(row) <= len(self._weights)
        assert row.flags.c_contiguous and row.dtype == np.float32
        count = self._survivors(
            row.ctypes.data,
            len(row),
            len(row) if top_k is None else min(top_k, len(row)),
            1.0 if top_p is None else top_p,
            -np.inf if min_p_logit is None else min_p_logit,
            peak,
            1 / temperature,
            self._ids.ctypes.data,
            self._weights.ctypes.data,
        )
        if count < 0:
            return None, self._weights[: len(row)]
        return self._ids[:count], self._weights[:count]

    def pick(self, weights: Floats, uniform: float) -> int:
        assert weights.flags.c_contiguous and weights.dtype == np.float32
        return int(self._pick(weights.ctypes.data, len(weights), uniform))
