"""SamplingRows: how each row of an iteration is sampled, as it lies on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """Of R rows of logits over V ids, on the device; int32 where nothing else is said.

    What a row has in a list is ``list[starts[row] : starts[row + 1]]``.
    """

    temperatures: Tensor
    """float32[R]; 0: the largest logit is taken without a draw."""
    top_ks: Tensor
    """[R], >= 1; V or more: all."""
    top_ps: Tensor
    """float64[R] in (0, 1]; 1: all."""
    min_p_offsets: Tensor
    """float64[R], temperature * log(min_p), <= 0: what a logit may be below the largest one; -inf:
    anything."""
    uniforms: Tensor
    """float64[R] in [0, 1): the draw of each row."""
    wants_log_prob: Tensor
    """[R], 0 or 1."""
    is_left: Tensor
    """[R], 0 or 1; 1: not sampled here, and its logits stay as they are."""
    bias_starts: Tensor
    """[R + 1]."""
    bias_ids: Tensor
    """No id twice in a row."""
    biases: Tensor
    """float32, added to the logits of ``bias_ids``."""
    masked_starts: Tensor
    """[R + 1]."""
    masked_ids: Tensor
    """May not be chosen, unless nothing else could be; no id twice in a row."""
    repetition_penalties: Tensor
    """float32[R], as the next two: what ids lose that are in ``counts``. 1, 0, 0: nothing."""
    presence_penalties: Tensor
    frequency_penalties: Tensor
    slots: Tensor
    """[R], whose ``counts`` are the row's; read only of rows with penalties."""
    fresh_slots: Tensor
    """Whose counts are forgotten first."""
    counted_starts: Tensor
    """[R + 1]."""
    counted_ids: Tensor
    """Each adds 1 to the row's count of it; an id may be there several times."""
    counts: Tensor
    """[slots, V], how often each id occurs in the sequence of a slot; it outlives the iteration."""
    has_penalties: bool
    """Of any row."""
    normalize_log_probs: bool
    """Of the chosen token among those that survive its rules; else among all."""

    def with_left(self, is_left: Tensor) -> SamplingRows:
        return replace(self, is_left=is_left)
