"""What a device that samples is told of an iteration's rows, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LARGEST_LOGIT = 1e30
"""Raw maxima and biases are held within +-this, so no edit can take a maximum out of float32."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRoom:
    """What a device keeps room for."""

    num_slots: int
    """Sequences whose seen ids are counted there; as many as an iteration has rows at most."""
    num_listed: int
    """Ids in the lists of an iteration: biases, masks, and ids to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLists:
    """A list of ids for each of R rows, end to end: row i has [starts[i], starts[i + 1])."""

    starts: Int32Array
    """int32[R + 1]."""
    ids: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """How the R sampling rows of an iteration are sampled: ``Sampler``'s rules as numbers. Each
    has a neutral value, with which its rule changes nothing."""

    temperatures: Float32Array
    """float32[R]; 0: greedy, without a draw."""
    top_ks: Int32Array
    """int32[R], >= 1; neutral from the size of the vocabulary on."""
    top_ps: Float64Array
    """float64[R] in (0, 1]; neutral 1."""
    min_p_offsets: Float64Array
    """float64[R], temperature * log(min_p); neutral -inf."""
    uniforms: Float64Array
    """float64[R] in [0, 1): the draw of each row; not read of greedy rows."""
    repetition_penalties: Float32Array
    """float32[R], neutral 1; the next two float32[R], neutral 0."""
    presence_penalties: Float32Array
    frequency_penalties: Float32Array
    wants_log_prob: Int32Array
    """int32[R], 0 or 1."""
    is_left: Int32Array
    """int32[R], 0 or 1; 1: the row is left to the host, which asks for its logits."""
    slots: Int32Array
    """int32[R], in [0, num_slots), all different: whose counts are the row's."""
    fresh_slots: Int32Array
    """int32[F], slots whose counts are forgotten before anything is counted."""
    counted: RowLists
    """Ids that each row's sequence has got since its slot was counted last, as often as it has."""
    biased: RowLists
    """No id twice in a row."""
    biases: Float32Array
    """float32, one for each of ``biased.ids``."""
    masked: RowLists
    """Ids that cannot be chosen, unless nothing else is left; no id twice in a row."""
    normalize_log_probs: bool
    """As Sampler says."""

    @property
    def has_penalties(self) -> bool:
        """Of any row."""
        return bool(
            (self.repetition_penalties != 1).any()
            or self.presence_penalties.any()
            or self.frequency_penalties.any()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """A device's answer to SamplingInputs of R rows."""

    token_ids: Int32Array
    """int32[R]; those of ``left`` mean nothing."""
    log_probs: Float32Array
    """float32[R], natural logarithms; 0 for the rows that want none."""
    left: npt.NDArray[np.int64]
    """int64[L], ascending: the rows that were not sampled. Beside those of ``is_left`` they are the
    ones whose raw logits hold NaN or have their largest beyond +-LARGEST_LOGIT."""
